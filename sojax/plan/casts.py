"""Which casts the host makes in passes of their own."""

import dataclasses

from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class SeparateCasts:
  """The casts that are no part of an update.

  Attributes:
    widen: gradients to float32, before the update.
    narrow: masters to the working dtype, after it.
  """

  widen: bool
  narrow: bool

  @classmethod
  def of(cls, plan: Plan, config: TrainConfig) -> "SeparateCasts":
    """Returns those of a plan; in float32 there is nothing to cast.

    >>> config = TrainConfig(micro_batch=1, seq_len=8, precision="bf16")
    >>> SeparateCasts.of(Plan(weight_cast="host_separate"), config)
    SeparateCasts(widen=False, narrow=True)
    """
    casting = config.working_dtype != "float32"
    return cls(
      widen=casting and plan.grad_cast == "host_separate",
      narrow=casting and plan.weight_cast == "host_separate",
    )
