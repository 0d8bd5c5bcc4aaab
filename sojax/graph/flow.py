"""When weights that flow are fetched: the window of uses that have theirs.

A step's uses are its forwards and backwards, in order. Those that compute with
weights that flow have them on the device in a window of `Plan.flow_window`
uses: what use u fetches waits for the end of the use that is so many such uses
before. Uses that have all their weights there do not count. What stays from
forward to backward is there between its two uses as well. With a window of 2,
where stage 1 is weight-stationary:

    F0  F1  F2  F3  B4  B3  B2  B1  B0
                 |   |   |   |       |
    waits for   F0  F2  F3  B4      B3
"""

import dataclasses
from collections.abc import Iterator, Sequence

from sojax.graph.graph import TaskKind
from sojax.plan.buckets import Bucket
from sojax.plan.residency import Residency


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
  """One program that computes with a stage's weights."""

  kind: TaskKind
  stage: int
  micro: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
  """What flows in for one use. Uses are named by their place in the step.

  Attributes:
    use: the use.
    buckets: what it fetches.
    before: the use that comes next in the schedule.
    frees: the use whose end makes room; one of the previous step, counted from
      that one's end, if it is negative.
  """

  use: int
  buckets: tuple[Bucket, ...]
  before: int
  frees: int


def uses_of_step(num_stages: int, accumulation: int) -> Iterator[Use]:
  """Yields the uses of a step; the last stage's forward is its backward."""
  last = num_stages - 1
  for micro in range(accumulation):
    for stage in range(last):
      yield Use(TaskKind.FORWARD, stage, micro)
    for stage in reversed(range(last + 1)):
      yield Use(TaskKind.BACKWARD, stage, micro)


def plan_fetches(
  uses: Sequence[Use], residency: Residency, flow_window: int
) -> Iterator[Fetch]:
  """Yields what is fetched, in the order of the uses.

  A fetch is scheduled after the use that follows the one that makes room, so
  that the device has work while whoever issues it waits. And no more than
  `flow_window - 1` uses ahead of its own: it may wait for an update of the
  previous step, and a stage's weights are updated the later, the later the
  stage.

  Args:
    uses: those of a step.
    residency: which weights flow.
    flow_window: see `Plan`.
  """
  flowing = [
    place for place, use in enumerate(uses) if residency.flowing_to(use.stage)
  ]
  window = min(flow_window, len(flowing))
  for number, place in enumerate(flowing):
    use = uses[place]
    backward = use.kind is TaskKind.BACKWARD
    buckets = residency.fetched_for(use.stage, backward=backward)
    if not buckets:
      continue
    in_step = number >= window
    freed_by = flowing[number - window]
    yield Fetch(
      use=place,
      buckets=buckets,
      before=max(place - flow_window + 1, freed_by + 2 if in_step else 0),
      frees=freed_by if in_step else freed_by - len(uses),
    )
