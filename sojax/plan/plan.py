"""The plan: how a step is carried out, every technique a switch of its own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sojax.plan.config import TrainConfig

MIB = 1 << 20
MIN_BUCKET_BYTES = 1 << 16
DEFAULT_BUCKET_BYTES = 64 * MIB
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_CHOICES: dict[str, tuple[str, ...]] = {
  "weights": ("stationary", "flow"),
  "grad_cast": ("host", "device"),
  "weight_cast": ("host", "device"),
  "gradients_out": ("dma",),
  "activations": ("recompute",),
  "accumulate": ("device",),
  "speculation": ("wait",),
  "master": ("fp32",),
  "park": ("host",),
}
_NOT_YET: dict[str, tuple[str, ...]] = {
  "grad_cast": ("host_separate",),
  "weight_cast": ("host_separate",),
  "gradients_out": ("callback",),
  "activations": ("keep", "offload"),
  "accumulate": ("host",),
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
    gradients_out: transport of gradients to the host: "dma".
    activations: what backward gets: "recompute" keeps stage inputs only.
    accumulate: the side that adds up micro-batches: "device".
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
  gradients_out: str = "dma"
  activations: str = "recompute"
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
