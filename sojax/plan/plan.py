"""The plan: how a step is carried out, every technique a switch of its own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sojax.plan.config import TrainConfig

MIB = 1 << 20
MIN_BUCKET_BYTES = 1 << 16
DEFAULT_BUCKET_BYTES = 64 * MIB
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_CHOICES: dict[str, tuple[str | None, ...]] = {
  "weights": ("stationary", "flow"),
  "grad_cast": ("host", "device"),
  "weight_cast": ("host", "device"),
  "gradients_out": (None, "dma", "callback", "io_callback"),
  "accumulate": ("device", "host"),
  "speculation": ("wait",),
  "master": ("fp32",),
  "park": ("host",),
}
ACTIVATIONS = ("recompute", "keep", "offload")
"""What can be done with a stage's activations between forward and backward."""

_NOT_YET: dict[str, tuple[str, ...]] = {
  "grad_cast": ("host_separate",),
  "weight_cast": ("host_separate",),
  "speculation": ("record2", "record3", "pingpong"),
  "master": ("split",),
  "park": ("device",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """How a training step is carried out; it never changes what is computed.

  Attributes:
    weights: where working weights live between uses: "stationary" on the
      device, or "flow", streamed in from the host for each use.
    bucket_bytes: soft upper limit of a bucket on the wire, in bytes.
    device_buckets: how many of the trained buckets that backward finishes last
      keep their master weights and moments on the device.
    grad_cast: which side widens gradients to float32: "host" (the wire carries
      the working dtype) or "device" (the wire carries float32).
    weight_cast: which side rounds masters to the working dtype: "host" (the
      wire carries the working dtype) or "device" (it carries float32).
    flow_window: uses (forwards or backwards of a stage) whose weights are on
      the device at once in weight-flow.
    ring_slots: buckets' worth of pinned buffers for weights on their way to the
      device in weight-stationary.
    pool_threads: host threads that update buckets; None takes every core.
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
    speculation: how updates run ahead of validation: "wait" does not.
    master: storage of master weights: "fp32".
    park: where gradients wait for validation: "host".
  """

  weights: str = "stationary"
  bucket_bytes: int = DEFAULT_BUCKET_BYTES
  device_buckets: int = 0
  grad_cast: str = "host"
  weight_cast: str = "host"
  flow_window: int = 2
  ring_slots: int = 2
  pool_threads: int | None = None
  gradients_out: str | None = None
  activations: str | tuple[str, ...] = "recompute"
  accumulate: str = "device"
  speculation: str = "wait"
  master: str = "fp32"
  park: str = "host"

  def __post_init__(self):
    for name, choices in _CHOICES.items():
      value = getattr(self, name)
      if value in _NOT_YET.get(name, ()):
        raise ValueError(
          f"{name}={value!r} is not there yet; use one of {choices}"
        )
      if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {choices}")
    self._check_activations()
    self._check_count("bucket_bytes", MIN_BUCKET_BYTES)
    self._check_count("device_buckets", 0)
    self._check_count("flow_window", 2)
    self._check_count("ring_slots", 1)
    if self.pool_threads is not None:
      self._check_count("pool_threads", 1)
    if self.weights == "flow" and self.device_buckets:
      raise ValueError(
        f"device_buckets={self.device_buckets} keeps master weights on the"
        " device, which weights='flow' has no room for; use 0"
      )

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
    named = self.activations
    policies = [named] * num_stages if isinstance(named, str) else [*named]
    if len(policies) != num_stages:
      raise ValueError(
        f"activations names {len(policies)} stages, but the model has"
        f" {num_stages}; name one for each, or one for all"
      )
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

  def _check_activations(self) -> None:
    named = self.activations
    if not isinstance(named, str | tuple):
      raise ValueError(
        f"activations={named!r} must be one of {ACTIVATIONS}, or a tuple with"
        " one for each stage"
      )
    for policy in (named,) if isinstance(named, str) else named:
      if policy not in ACTIVATIONS:
        raise ValueError(f"activations={policy!r} is not one of {ACTIVATIONS}")

  def _check_count(self, name: str, at_least: int) -> None:
    value = getattr(self, name)
    if isinstance(value, bool) or not isinstance(value, int):
      raise ValueError(f"{name}={value!r} must be an integer")
    if value < at_least:
      raise ValueError(f"{name}={value} is below {at_least}; raise {name}")

  @classmethod
  def of(cls, plan: "str | Plan | Mapping[str, Any]") -> "Plan":
    """Returns the plan that a user's short form means.

    Args:
      plan: a plan, a mapping of its switches, or "auto": weight-stationary
        with every bucket on the host.

    Returns:
      The plan.

    Raises:
      ValueError: for an unknown switch or a value out of its range.

    >>> Plan.of({"weights": "flow"}).weights
    'flow'
    """
    if isinstance(plan, Plan):
      return plan
    if isinstance(plan, str):
      if plan != "auto":
        raise ValueError(
          f"plan={plan!r} is unknown; use 'auto', a Plan or a mapping"
        )
      return cls()
    if not isinstance(plan, Mapping):
      raise ValueError(
        f"plan is a {type(plan).__name__}; use 'auto', a Plan or a mapping"
      )
    known = [field.name for field in dataclasses.fields(cls)]
    unknown = sorted(set(plan) - set(known))
    if unknown:
      raise ValueError(f"unknown plan switch {unknown[0]!r}; known: {known}")
    return cls(**plan)


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
    """
    working = config.working_dtype
    return cls(
      grad=working if plan.grad_cast == "host" else "float32",
      weight=working if plan.weight_cast == "host" else "float32",
    )

  @property
  def grad_bytes(self) -> int:
    """Bytes of one gradient element on the wire."""
    return DTYPE_BYTES[self.grad]

  @property
  def weight_bytes(self) -> int:
    """Bytes of one weight element on the wire."""
    return DTYPE_BYTES[self.weight]
