"""What is trained: batch, precision and clipping."""

import dataclasses
import math

PRECISIONS = ("fp32", "bf16")
"""The supported dtypes of the working weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """The quantities of a training step that change its result.

  Attributes:
    micro_batch: sequences per micro-batch on each data rank.
    seq_len: tokens per sequence that are predicted; a batch has one more.
    accumulation: micro-batches per optimizer step.
    precision: dtype of working weights and activations: "fp32" or "bf16".
      Master weights and moments are always float32.
    clip_norm: bound of the global gradient norm; None does not clip.
  """

  micro_batch: int
  seq_len: int
  accumulation: int = 1
  precision: str = "fp32"
  clip_norm: float | None = 1.0

  def __post_init__(self):
    for name in ("micro_batch", "seq_len", "accumulation"):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")
    if self.precision not in PRECISIONS:
      raise ValueError(
        f"precision={self.precision!r} is not one of {PRECISIONS}"
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
    return {"fp32": "float32", "bf16": "bfloat16"}[self.precision]
