"""Updates that run ahead of a step's validation: whether, and what became."""

import dataclasses
import enum
import math

import numpy as np


class NormSource(enum.Enum):
  """Who tells how large the gradients are that are there so far.

  Backwards do when they end, which is before the host has their gradients; sums
  on the host, where micro-batches are added up there; or updates that run ahead
  of the end of the backward.
  """

  STAGES = enum.auto()
  HOST_SUMS = enum.auto()
  UPDATES = enum.auto()


class NormWatch:
  """The sum of squares of the gradients that are there so far.

  It only grows: once it is past the bound, the step will be clipped.

  Attributes:
    source: whose sums count. Those of the others are the same gradients'.
  """

  def __init__(self, clip_norm: float | None, source: NormSource):
    """Starts from zero.

    Args:
      clip_norm: the bound of the norm; None if there is none.
      source: whose sums count.
    """
    self._clip_norm = math.inf if clip_norm is None else clip_norm
    self.source = source
    self._total = 0.0

  def add(self, source: NormSource, sumsq: np.ndarray | np.floating) -> None:
    """Adds sums of squares of gradients; each source is one thread."""
    if source is self.source:
      with np.errstate(over="ignore", invalid="ignore"):
        self._total += float(np.sum(sumsq, dtype=np.float64))

  def objection(self, grad_scale: float) -> str | None:
    """Returns why no update should run ahead any more, or None.

    Args:
      grad_scale: what the gradients are multiplied by if they are not clipped.
    """
    total = self._total
    if not math.isfinite(total):
      return "waits: a gradient is not finite"
    if math.sqrt(total) * grad_scale > self._clip_norm:
      return "waits: the norm is past the clip norm"
    return None


class Outcome(enum.StrEnum):
  """What became of an update that could be taken back."""

  COMMITTED = "committed"
  REDONE = "redone"
  UNDONE = "undone"
  LATE = "late"
  """It did not run ahead of validation, and was taken after it if at all."""


@dataclasses.dataclass(eq=False)
class Speculation:
  """The updates of a step that run ahead of its validation.

  Attributes:
    reason: why they do; or, if `wanted` is False, why not.
    wanted: whether they do.
    watch: the norm so far, which may end it.
    ran: buckets whose update has begun ahead, in order.
    in_doubt: those of which it has failed halfway.
    outcomes: what became of each bucket's update.
    record_bytes: what it took to be able to take them back.
    num_escapes: values that no code could express.
  """

  reason: str = "waits: the plan says so"
  wanted: bool = False
  watch: NormWatch = dataclasses.field(
    default_factory=lambda: NormWatch(None, NormSource.STAGES)
  )
  ran: list[int] = dataclasses.field(default_factory=list)
  in_doubt: set[int] = dataclasses.field(default_factory=set)
  outcomes: dict[int, Outcome] = dataclasses.field(default_factory=dict)
  record_bytes: int = 0
  num_escapes: int = 0

  def why_not(self, grad_scale: float) -> str | None:
    """Returns why the next update must not run ahead, or None if it may.

    Args:
      grad_scale: what it takes for the gradients' factor.
    """
    if not self.wanted:
      return self.reason
    return self.watch.objection(grad_scale)
