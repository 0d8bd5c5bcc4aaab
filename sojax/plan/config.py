"""What is trained: batch, precision and clipping."""

import dataclasses
import math

_WORKING_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
  """The dynamic loss scale of fp16 (Micikevicius et al., arXiv 1710.03740).

  Gradients are computed of the loss times the scale, and divided by it before
  they are clipped and used. A step whose gradients are not finite is skipped
  and lowers the scale.

  Attributes:
    initial: the first scale.
    growth_interval: finite steps in a row after which the scale grows.
    growth_factor: what it is then multiplied by.
    backoff_factor: what it is multiplied by after a step that is skipped; it
      never falls below 1.
  """

  initial: float = 2.0**12
  growth_interval: int = 2000
  growth_factor: float = 2.0
  backoff_factor: float = 0.5

  def __post_init__(self):
    _check_at_least("growth_interval", self.growth_interval, 1)
    # Powers of two scale floating-point numbers without rounding.
    for name, low, high in (
      ("initial", 1.0, 2.0**24),
      ("growth_factor", 2.0, 2.0**8),
      ("backoff_factor", 2.0**-8, 0.5),
    ):
      value = getattr(self, name)
      if not low <= value <= high or math.frexp(value)[0] != 0.5:
        raise ValueError(
          f"{name}={value} must be a power of two in [{low}, {high}]"
        )


def _check_at_least(name: str, value: object, bound: int) -> None:
  if isinstance(value, bool) or not isinstance(value, int) or value < bound:
    raise ValueError(f"{name}={value!r} must be an integer of at least {bound}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """The quantities of a training step that change its result.

  Attributes:
    micro_batch: sequences per micro-batch on each data rank.
    seq_len: tokens per sequence that are predicted; a batch has one more.
    accumulation: micro-batches per optimizer step.
    precision: dtype of working weights and activations: "fp32", "bf16" or
      "fp16". Master weights and moments are always float32.
    clip_norm: bound of the global gradient norm; None does not clip.
    loss_scale: how fp16 scales the loss; without effect in other precisions.
    max_consecutive_skips: steps in a row with gradients that are not finite,
      after which training stops with an error.
  """

  micro_batch: int
  seq_len: int
  accumulation: int = 1
  precision: str = "fp32"
  clip_norm: float | None = 1.0
  loss_scale: LossScale = LossScale()
  max_consecutive_skips: int = 50

  def __post_init__(self):
    for name in (
      "micro_batch",
      "seq_len",
      "accumulation",
      "max_consecutive_skips",
    ):
      _check_at_least(name, getattr(self, name), 1)
    if self.precision not in _WORKING_DTYPES:
      raise ValueError(
        f"precision={self.precision!r} is not one of {(*_WORKING_DTYPES,)}"
      )
    norm = self.clip_norm
    if norm is not None and not (
      isinstance(norm, int | float) and 0.0 < norm < math.inf
    ):
      raise ValueError(
        f"clip_norm={norm!r} must be positive and finite; use None to leave"
        " gradients unclipped"
      )

  @property
  def working_dtype(self) -> str:
    """The dtype's name in NumPy's terms."""
    return _WORKING_DTYPES[self.precision]

  @property
  def active_loss_scale(self) -> LossScale | None:
    """How the loss is scaled; None in precisions that need no scale."""
    return self.loss_scale if self.precision == "fp16" else None
