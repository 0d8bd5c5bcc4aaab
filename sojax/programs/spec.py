"""What shapes the programs of a stage, and what they take and return."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax

from sojax.programs.flatten import UnitSpec
from sojax.programs.manual import ROWS, SHARDS, WHOLE, Ranks
from sojax.programs.split_model import StageParts


class Position(enum.Enum):
  """Where a stage stands; it decides what goes in and comes out."""

  FIRST = "first"  # takes tokens, gives activations
  MIDDLE = "middle"  # takes and gives activations
  LAST = "last"  # takes activations, gives the loss
  ONLY = "only"  # takes tokens, gives the loss

  @property
  def is_first(self) -> bool:
    """Whether it takes tokens."""
    return self in (Position.FIRST, Position.ONLY)

  @property
  def is_last(self) -> bool:
    """Whether it gives the loss."""
    return self in (Position.LAST, Position.ONLY)

  @classmethod
  def of(cls, stage: int, num_stages: int) -> "Position":
    """Returns the position of a stage among `num_stages`."""
    first, last = stage == 0, stage == num_stages - 1
    if first and last:
      return cls.ONLY
    return cls.FIRST if first else cls.LAST if last else cls.MIDDLE


@dataclasses.dataclass(frozen=True)
class Gathered:
  """What a stage's parameters are put together from on several devices.

  Attributes:
    units: the wire units.
    shapes: the shape of the parameter at each place.
  """

  units: tuple[UnitSpec, ...]
  shapes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSpec:
  """Everything that shapes a stage's programs.

  Attributes:
    parts: how to put the module together.
    position: where the stage stands.
    loss: the caller's own loss, in the last stage; see
      `sojax.models.loss.loss_function`.
    trained: places of the trained parameters that the stage owns.
    tied: places of the trained parameters that it borrows.
    units: the wire units of its gradients, those of host buckets first.
    num_on_host: how many units are those of host buckets.
    accumulate: the side that adds up their micro-batches; see `Plan`.
    grad_dtype: dtype of gradients on the wire.
    transport: how gradients get to the host; see `Plan.transport`.
    reuses_dy: whether the input's gradient can take the place of the output's.
    working_dtype: dtype of parameters on the device.
    ranks: the devices.
    gathered: what parameters are gathered from; None on one device.
  """

  parts: StageParts
  position: Position
  loss: Callable[..., Any] | None
  trained: tuple[int, ...]
  tied: tuple[int, ...]
  units: tuple[UnitSpec, ...]
  num_on_host: int
  accumulate: str
  grad_dtype: str
  transport: str
  reuses_dy: bool
  working_dtype: str
  ranks: Ranks = Ranks(1)
  gathered: Gathered | None = None

  @property
  def adds_units(self) -> bool:
    """Whether micro-batches are added up by unit, not by parameter."""
    return self.accumulate == "host" or not self.ranks.alone

  @property
  def num_sent(self) -> int:
    """How many units, the first ones, are sent with every micro-batch."""
    return self.num_on_host if self.accumulate == "host" else 0

  @property
  def num_delivered(self) -> int:
    """How many of the units that are sent backward itself delivers."""
    return 0 if self.transport == "dma" else self.num_on_host


@dataclasses.dataclass(frozen=True)
class Targets:
  """What the last stage needs beside activations.

  Attributes:
    tokens: int32 [B, T], the tokens to predict.
    mask: float32 [B, T], weight of each position.
    scale: float32 scalar; the loss is this times the masked sum: one over the
      global batch's number of unmasked tokens.
    loss_scale: float32 scalar; gradients are those of this times the loss.
  """

  tokens: jax.Array
  mask: jax.Array
  scale: jax.Array
  loss_scale: jax.Array


jax.tree_util.register_dataclass(Targets)


@dataclasses.dataclass(frozen=True)
class BackwardOut:
  """What a backward program returns; unused fields are empty.

  Attributes:
    dx: gradient of the stage's input.
    tied: gradients of borrowed parameters, in the order of `StageSpec.tied`;
      of several ranks stacked, and not yet added up.
    partial: float32 sums of gradients over the micro-batches so far, from all
      of them but the last: in the order of `StageSpec.trained`, or of the units
      that are not sent.
    units: gradients as wire units: all from the last micro-batch, and from the
      others those that are sent; but for those that backward delivers itself.
    sumsq: float32 [n], sums of squares of what the device has added up, as it
      crosses the wire: of each parameter, or of each unit that is not sent; of
      several ranks stacked. From all micro-batches but the last, zeros; and
      one zero if there are none. It is never donated, so it tells when the
      program has ended.
    loss: float32 scalar, from the last stage.
    other: the stage's new other state, from the last stage.
  """

  sumsq: jax.Array
  dx: jax.Array | None = None
  tied: tuple[jax.Array, ...] = ()
  partial: tuple[jax.Array, ...] = ()
  units: tuple[jax.Array, ...] = ()
  loss: jax.Array | None = None
  other: tuple[jax.Array, ...] = ()


jax.tree_util.register_dataclass(BackwardOut)

# How the devices divide them, for `manual_jit`: trees of specs.
_targets: dict[str, Any] = {
  "tokens": ROWS,
  "mask": ROWS,
  "scale": WHOLE,
  "loss_scale": WHOLE,
}
_backward_out: dict[str, Any] = {
  "sumsq": SHARDS,
  "dx": ROWS,
  "tied": SHARDS,
  "partial": SHARDS,
  "units": SHARDS,
  "loss": WHOLE,
  "other": WHOLE,
}
TARGETS_SPECS = Targets(**_targets)
BACKWARD_OUT_SPECS = BackwardOut(**_backward_out)
