"""Stages: the consecutive parts in which a model is trained."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flax import nnx


@dataclass(frozen=True, kw_only=True)
class Stage:
  """One part of a model, with a forward and a backward of its own.

  Stages run in order, each on what the one before it returned. The first takes
  int32 tokens [B, T]; the module of the last has, besides its forward, a method
  `loss(x_BTD, targets_BT, mask_BT)` that returns a float32 scalar: the sum over
  positions of mask times the loss. Modules compute in the dtype of their
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


@runtime_checkable
class SupportsStages(Protocol):
  """A model that says into which parts it can be cut.

  If it also has an attribute `vocab_size`, tokens outside [0, vocab_size) are
  refused before they reach the device.
  """

  def stages(self) -> list[Stage]:
    """Returns the parts in forward order; together they hold every Param."""
    ...
