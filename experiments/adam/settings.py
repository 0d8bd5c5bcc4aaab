"""The two types of gradients that are compared, and the step that is taken."""

import dataclasses

from experiments.adam.arrays import Arrays
from sojax.plan.adamw import AdamW, adam_scalars

HYPER = AdamW(learning_rate=1e-4, b2=0.95, weight_decay=0.1)
# Steps taken before. Few, so that a missing bias correction would show.
COUNT = 9
SCALARS = adam_scalars(HYPER, COUNT)


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is read and written besides masters and moments.

  Attributes:
    name: of the setting.
    half: whether gradients are bfloat16, and bfloat16 weights are written.
      Otherwise gradients are float32, and the masters are the weights.
  """

  name: str
  half: bool

  def grad(self, arrays: Arrays):
    """Returns the gradients."""
    return arrays.grad16 if self.half else arrays.grad

  def weight(self, arrays: Arrays):
    """Returns where the weights go, or None."""
    return arrays.weight if self.half else None

  @property
  def bytes_per_param(self) -> int:
    """What a step reads and writes for each parameter: 28 in both."""
    return 3 * 8 + (2 + 2 if self.half else 4)


FP32 = Setting("fp32", half=False)
BF16 = Setting("bf16", half=True)
SETTINGS = (FP32, BF16)
