"""Stages: the consecutive parts in which a model is trained."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from flax import nnx


@dataclass(frozen=True, kw_only=True)
class Stage:
  """One part of a model, with a forward and a backward of its own.

  Stages run in order, each on what the one before it returned. The first takes
  int32 tokens [B, T]; what the last returns, the loss is computed from (see
  `sojax.models.loss.loss_function`). Modules compute in the dtype of their
  parameters.

  An `nnx.Param` object that appears in several stages is tied: it is trained
  once, by the sum of its gradients, and belongs to the earliest of them. Stages
  that are to share one compilation have equal graphdefs.

  Attributes:
    name: prefix of the names of the stage's parameters, without a dot.
    module: the part itself, the model's own object and not a copy.
  """

  name: str
  module: nnx.Module

  def __post_init__(self):
    if not self.name or "." in self.name:
      raise ValueError(
        f"stage name {self.name!r} must be non-empty and have no dot, which"
        " separates it from the names of its parameters"
      )


def stages_of(model: nnx.Module) -> list[Stage]:
  """Returns the parts of a model in forward order.

  Those are what its method `stages()` returns, which together must hold every
  Param of the model, or the whole model as the only one. If the model has an
  attribute `vocab_size`, tokens outside [0, vocab_size) are refused before they
  reach the device.
  """
  stages: Any = getattr(model, "stages", None)
  if callable(stages):  # a module may have a list of that name
    return list(cast(Iterable[Stage], stages()))
  return [Stage(name="model", module=model)]
