"""The plan: how a step is carried out, every technique a switch of its own."""

import dataclasses
from collections.abc import Mapping

from sojax.plan.config import TrainConfig

MIB = 1 << 20
MIN_BUCKET_BYTES = 1 << 16
DEFAULT_BUCKET_BYTES = 64 * MIB
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_CHOICES: dict[str, tuple[str | None, ...]] = {
  "grad_cast": ("host", "device", "host_separate"),
  "weight_cast": ("host", "device", "host_separate"),
  "gradients_out": (None, "dma", "callback", "io_callback"),
  "accumulate": ("device", "host"),
  "speculation": ("wait", "record2", "record3", "pingpong"),
  "speculate": ("adaptive", "always", "never"),
  "master": ("fp32", "split"),
  "park": ("host", "device"),
}
ACTIVATIONS = ("recompute", "keep", "offload")
"""What can be done with a stage's activations between forward and backward."""

WEIGHTS = ("stationary", "flow", "flow_once")
"""Where a stage's working weights are between its uses."""

# One for all stages, or a tuple with one for each.
_BY_STAGE = {"weights": WEIGHTS, "activations": ACTIVATIONS}

# Named by tuples, which JSON does not have.
_TUPLES = ("pool_cores", *_BY_STAGE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """How a training step is carried out; it never changes what is computed.

  Attributes:
    weights: where working weights live between uses: "stationary" on the
      device; "flow" on the host, streamed in for each use; or "flow_once", for
      each forward, after which they stay on the device until the backward of
      the same micro-batch. One for all stages, or a tuple with one for each.
      What a stage borrows is where its owner has it: weights that flow are
      streamed in for the borrower, too.
    bucket_bytes: soft upper limit of a bucket on the wire, in bytes.
    device_buckets: how many of the trained buckets that backward finishes last
      keep their master weights and moments on the device. Their stages must be
      weight-stationary.
    host_ratio: instead of `device_buckets`, the share of the trained buckets
      that the host updates, in [0, 1], rounded to whole buckets, halves up; a
      float is the decimal number that it is written as. None leaves it to
      `device_buckets`.
    grad_cast: which side widens gradients to float32: "host", inside the update
      (the wire carries the working dtype); "device" (the wire carries float32);
      or "host_separate", to compare with: as "host", but in a pass before the
      update. Then updates cannot run ahead, and micro-batches are added up on
      the device: the host's sums are float32 already.
    weight_cast: which side rounds masters to the working dtype: "host", inside
      the update (the wire carries the working dtype); "device" (it carries
      float32); or "host_separate", to compare with: as "host", but in a pass
      after the update. Then updates cannot run ahead.
    flow_window: uses (forwards or backwards of a stage) whose weights are on
      the device at once, of those that need weights that flow; beside what
      "flow_once" lets stay.
    grad_window: backwards whose gradients are on the device at once, on their
      way to the host: one more is not dispatched before those of the first
      have left. None does not wait. Not for park="device", where they stay.
    ring_slots: buckets' worth of pinned buffers for new weights on their way to
      weight-stationary stages; and for gradients if they are parked on the
      device.
    pool_threads: host threads that update buckets; None takes every core, or
      as many as `pool_cores` names.
    pool_cores: the core of each of them, all different; None binds none.
    numa_node: the NUMA node that master weights, moments and sums of gradients
      are bound to, best that of the device and of `pool_cores`; None binds
      nothing. The pinned buffers of transfers are jax's, and not bound.
    gradients_out: transport of gradients to the host: "dma" sends them when
      their program has ended; "callback" delivers each while the program runs;
      "io_callback" is its slow twin in Python, on one device. None takes
      "callback" for a model of one stage, else "dma"; see `transport`.
    activations: what a stage's forward leaves for its backward: "recompute"
      its input, from which backward computes it again; "keep" all that backward
      needs; "offload" its input, which waits in pinned host memory. One for all
      stages, or a tuple with one for each; see `activations_by_stage`.
    accumulate: the side that adds up the micro-batches of host buckets, in
      float32: "device", where each stage's sums stay until the last one; or
      "host", to which every micro-batch's gradients go, rounded to the working
      dtype. Its updates take the sums as they are, and the norm is a sum of
      float64. Those of device buckets are added up on the device.
    speculation: what takes an update back that ran ahead of validation: nothing
      ("wait": none does), a record of 2 or 3 bytes per parameter ("record2",
      "record3"), or copies of 12 bytes ("pingpong").
    speculate: whether updates run ahead where they can be taken back:
      "adaptive" decides from measured times, step by step; "always"; "never".
    max_record_bytes: host memory for what takes updates back; None for as much
      as all host buckets need. Those that find no room wait for validation.
    escape_bytes_per_param: the room in a record for values that its codes
      cannot express, on the average of a bucket. What does not fit waits.
    master: storage of the host's master weights: "fp32"; or "split" into the
      working weight, a bfloat16 in pinned memory from which it is sent, and a
      remainder of 16 bits. For precision="bf16" and weight_cast="host".
    park: where gradients wait for validation: on the "host", in pinned memory;
      or on the "device", which leaves them nothing to overlap with, and the
      host with those of `ring_slots` buckets at once. Updates cannot run ahead
      then.
  """

  weights: str | tuple[str, ...] = "stationary"
  bucket_bytes: int = DEFAULT_BUCKET_BYTES
  device_buckets: int = 0
  host_ratio: float | None = None
  grad_cast: str = "host"
  weight_cast: str = "host"
  flow_window: int = 2
  grad_window: int | None = None
  ring_slots: int = 2
  pool_threads: int | None = None
  pool_cores: tuple[int, ...] | None = None
  numa_node: int | None = None
  gradients_out: str | None = None
  activations: str | tuple[str, ...] = "recompute"
  accumulate: str = "device"
  speculation: str = "wait"
  speculate: str = "adaptive"
  max_record_bytes: int | None = None
  escape_bytes_per_param: float = 0.5
  master: str = "fp32"
  park: str = "host"

  def __post_init__(self):
    for name, choices in _CHOICES.items():
      value = getattr(self, name)
      if not _is_one_of(value, choices):
        raise ValueError(f"{name}={value!r} is not one of {choices}")
    for name in _BY_STAGE:
      self._check_by_stage(name)
    self._check_count("bucket_bytes", MIN_BUCKET_BYTES)
    self._check_count("device_buckets", 0)
    if self.host_ratio is not None:
      self._check_host_ratio(self.host_ratio)
    self._check_count("flow_window", 2)
    if self.grad_window is not None:
      self._check_count("grad_window", 1)
    self._check_count("ring_slots", 1)
    if self.pool_threads is not None:
      self._check_count("pool_threads", 1)
    if self.max_record_bytes is not None:
      self._check_count("max_record_bytes", 0)
    self._check_escape_bytes()
    if self.pool_cores is not None:
      self._check_pool_cores(self.pool_cores)
    if self.numa_node is not None:
      self._check_count("numa_node", 0)
    if self.master == "split":
      self._check_split()
    if self.park == "device":
      self._check_parked_on_device()
    self._check_separate_casts()
    if self.device_buckets and self.weights in ("flow", "flow_once"):
      raise ValueError(
        f"device_buckets={self.device_buckets} keeps master weights on the"
        f" device, which weights={self.weights!r} has no room for; use 0"
      )

  @property
  def flows(self) -> bool:
    """Whether the weights of any stage are streamed in."""
    return any(where != "stationary" for where in self._named("weights"))

  def weights_by_stage(self, num_stages: int) -> tuple[str, ...]:
    """Returns where the working weights of each stage are.

    Args:
      num_stages: stages of the model.

    Returns:
      One of `WEIGHTS` for each stage.

    Raises:
      ValueError: if the plan names another number of stages.

    >>> Plan(weights="flow").weights_by_stage(2)
    ('flow', 'flow')
    """
    return self._by_stage("weights", num_stages)

  def activations_by_stage(self, num_stages: int) -> tuple[str, ...]:
    """Returns what is done with the activations of each stage.

    Two stages have no choice. The last one's backward is its forward, too:
    nothing waits in between, whatever the plan says. The first one's tokens
    are on the device anyway, and "offload" lets them stay.

    Args:
      num_stages: stages of the model.

    Returns:
      One of `ACTIVATIONS` for each stage; "recompute" where there is no choice.

    Raises:
      ValueError: if the plan names another number of stages.

    >>> Plan(activations="offload").activations_by_stage(4)
    ('recompute', 'offload', 'offload', 'recompute')
    """
    policies = [*self._by_stage("activations", num_stages)]
    if policies[0] == "offload":
      policies[0] = "recompute"
    policies[-1] = "recompute"
    return tuple(policies)

  def transport(self, num_stages: int) -> str:
    """Returns how gradients get to the host in a model of `num_stages`.

    With one stage there is one backward: nothing of it could overlap with the
    transfers, or with updates, if they waited for its end.

    >>> Plan().transport(1), Plan().transport(4)
    ('callback', 'dma')
    """
    if self.gradients_out is not None:
      return self.gradients_out
    if self.park == "device":
      return "dma"
    return "callback" if num_stages == 1 else "dma"

  def num_grads_on_host(self, num_stages: int, accumulation: int) -> int:
    """Returns how many gradients of a bucket have a place on the host at once.

    One; where the host adds up the micro-batches of a model of one stage two,
    or its backward would wait for the sums of the one before.

    Args:
      num_stages: stages of the model.
      accumulation: micro-batches per step.
    """
    two = self.accumulate == "host" and num_stages == 1
    return min(2 if two else 1, accumulation)

  def _named(self, name: str) -> tuple[str, ...]:
    named = getattr(self, name)
    return (named,) if isinstance(named, str) else named

  def _by_stage(self, name: str, num_stages: int) -> tuple[str, ...]:
    named = self._named(name)
    if isinstance(getattr(self, name), str):
      named *= num_stages
    if len(named) != num_stages:
      raise ValueError(
        f"{name} names {len(named)} stages, but the model has {num_stages};"
        " name one for each, or one for all"
      )
    return named

  def _check_by_stage(self, name: str) -> None:
    value, choices = getattr(self, name), _BY_STAGE[name]
    if not isinstance(value, str | tuple):
      raise ValueError(
        f"{name}={value!r} must be one of {choices}, or a tuple with one for"
        " each stage"
      )
    for choice in self._named(name):
      if not _is_one_of(choice, choices):
        raise ValueError(f"{name}={choice!r} is not one of {choices}")

  def _check_parked_on_device(self) -> None:
    for name, wanted in (
      ("speculation", ("wait",)),
      ("gradients_out", (None, "dma")),
      ("accumulate", ("device",)),
      ("grad_window", (None,)),
    ):
      value = getattr(self, name)
      if value not in wanted:
        raise ValueError(
          f"park='device' keeps gradients on the device until they are complete"
          f" and validated, but {name}={value!r}; use {wanted[-1]!r}, or"
          " park='host'"
        )

  def _check_separate_casts(self) -> None:
    """Nothing keeps what a pass has widened until an update is settled."""
    for name in ("grad_cast", "weight_cast"):
      if getattr(self, name) == "host_separate" and self.speculation != "wait":
        raise ValueError(
          f"{name}='host_separate' casts in a pass of its own, which no update"
          f" has that runs ahead, but speculation={self.speculation!r}; use"
          f" 'wait', or {name}='host'"
        )
    if self.grad_cast == "host_separate" and self.accumulate == "host":
      raise ValueError(
        "grad_cast='host_separate' widens gradients before the update, which"
        " accumulate='host' gives float32 sums; use accumulate='device', or"
        " grad_cast='host'"
      )

  def _check_split(self) -> None:
    if self.weight_cast != "host":
      raise ValueError(
        "master='split' sends the working weights as they are: weight_cast="
        f"{self.weight_cast!r} must be 'host'"
      )
    if self.speculation == "pingpong":
      raise ValueError(
        "speculation='pingpong' copies float32 masters; use master='fp32', or"
        " 'record2' or 'record3'"
      )

  def _check_host_ratio(self, ratio: object) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
      raise ValueError(f"host_ratio={ratio!r} must be a number in [0, 1]")
    if not 0 <= ratio <= 1:
      raise ValueError(
        f"host_ratio={ratio} must lie in [0, 1]; 1 leaves all buckets to the"
        " host"
      )
    if self.device_buckets:
      raise ValueError(
        f"host_ratio={ratio} says how many buckets are on the device, and so"
        f" does device_buckets={self.device_buckets}; give one of them"
      )

  def _check_escape_bytes(self) -> None:
    value = self.escape_bytes_per_param
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ValueError(f"escape_bytes_per_param={value!r} must be a number")
    if not 0 <= value <= 12:
      raise ValueError(
        f"escape_bytes_per_param={value} must lie in [0, 12]; 12 holds every"
        " value of every parameter"
      )

  def _check_pool_cores(self, cores: tuple[int, ...]) -> None:
    if not isinstance(cores, tuple) or not cores:
      raise ValueError(
        f"pool_cores={cores!r} must be a tuple with a core for each thread, or"
        " None"
      )
    for core in cores:
      if isinstance(core, bool) or not isinstance(core, int) or core < 0:
        raise ValueError(
          f"pool_cores={cores} holds {core!r}; name cores by integers from 0"
        )
    if len(set(cores)) != len(cores):
      raise ValueError(f"pool_cores={cores} must be different from each other")
    if self.pool_threads not in (None, len(cores)):
      raise ValueError(
        f"pool_cores={cores} names {len(cores)} cores for"
        f" pool_threads={self.pool_threads}; name one for each, or leave"
        " pool_threads out"
      )

  def _check_count(self, name: str, at_least: int) -> None:
    value = getattr(self, name)
    if isinstance(value, bool) or not isinstance(value, int):
      raise ValueError(f"{name}={value!r} must be an integer")
    if value < at_least:
      raise ValueError(f"{name}={value} is below {at_least}; raise {name}")

  @classmethod
  def of(cls, plan: object) -> "Plan":
    """Returns the plan that a user's short form means.

    Args:
      plan: a plan, or a mapping of its switches, in which a list may stand for
        a tuple, as in JSON.

    Returns:
      The plan.

    Raises:
      ValueError: for an unknown switch or a value out of its range.

    >>> Plan.of({"weights": "flow"}).weights
    'flow'
    """
    if isinstance(plan, Plan):
      return plan
    if not isinstance(plan, Mapping):
      raise ValueError(
        f"plan={plan!r} is neither a Plan nor a mapping of its switches"
      )
    known = [field.name for field in dataclasses.fields(cls)]
    for name in plan:
      if name not in known:
        raise ValueError(f"unknown plan switch {name!r}; known: {known}")
    tuples = {
      name: tuple(plan[name])
      for name in _TUPLES
      if isinstance(plan.get(name), list)
    }
    return cls(**{**plan, **tuples})


def _is_one_of(value: object, choices: tuple[str | None, ...]) -> bool:
  """Says whether a value is a choice; arrays say of each element if it is."""
  return isinstance(value, str | None) and value in choices


@dataclasses.dataclass(frozen=True, slots=True)
class WireDtypes:
  """Names of the dtypes that cross the link, out and in."""

  grad: str
  weight: str

  @classmethod
  def of(cls, plan: Plan, config: TrainConfig) -> "WireDtypes":
    """Returns them for the sides that cast.

    >>> from sojax.plan.config import TrainConfig
    >>> config = TrainConfig(micro_batch=1, seq_len=8, precision="bf16")
    >>> WireDtypes.of(Plan(grad_cast="device"), config)
    WireDtypes(grad='float32', weight='bfloat16')

    Raises:
      ValueError: if the plan splits masters but the precision is another.
    """
    working = config.working_dtype
    if plan.master == "split" and working != "bfloat16":
      raise ValueError(
        "master='split' keeps a bfloat16 of each master as the working weight,"
        f" but precision={config.precision!r}; use 'bf16', or master='fp32'"
      )
    return cls(
      grad="float32" if plan.grad_cast == "device" else working,
      weight="float32" if plan.weight_cast == "device" else working,
    )

  @property
  def grad_bytes(self) -> int:
    """Bytes of one gradient element on the wire."""
    return DTYPE_BYTES[self.grad]

  @property
  def weight_bytes(self) -> int:
    """Bytes of one weight element on the wire."""
    return DTYPE_BYTES[self.weight]
