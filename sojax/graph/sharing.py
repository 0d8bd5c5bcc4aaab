"""How tasks that run at once share memories and cores: max-min fairness."""

import math
from collections.abc import Iterable, Mapping, Sequence

from sojax.plan.costs import Cost
from sojax.plan.hardware import Resource

Rates = tuple[tuple[Resource, float], ...]

_IDLE = -1


def max_min_speeds(
  rates: Sequence[Rates], capacities: Mapping[Resource, float]
) -> list[float]:
  """Returns how fast tasks run side by side, at most 1 each.

  All speeds are raised together; those of the tasks that share a resource stop
  where it is used up. So no capacity is passed, and no task could be faster
  without slowing one that is not faster than it.

  Args:
    rates: what each task uses per second at speed 1, of resources that have a
      capacity.
    capacities: what there is of each resource, per second.

  >>> memory = Resource.HOST_MEMORY
  >>> max_min_speeds([((memory, 3.0),), ((memory, 1.0),), ()], {memory: 2.0})
  [0.5, 0.5, 1.0]
  """
  speeds = [1.0] * len(rates)
  left = dict(capacities)
  rising = set(range(len(rates)))
  while rising:
    wanted = dict.fromkeys(left, 0.0)
    for task in sorted(rising):
      for resource, rate in rates[task]:
        wanted[resource] += rate
    levels = {r: left[r] / rate for r, rate in wanted.items() if rate > 0}
    level = min(levels.values(), default=1.0)
    if level >= 1:
      break
    scarce = {resource for resource, value in levels.items() if value == level}
    for task in sorted(rising):
      if any(resource in scarce for resource, _ in rates[task]):
        rising.remove(task)
        speeds[task] = level
        for resource, rate in rates[task]:
          left[resource] -= level * rate
  return speeds


class Sharing:
  """Runs at most one task on each lane, and knows when the next one ends.

  A task ends when its speed, added up over time, gives its seconds. Alone, or
  without capacities, it ends at its start plus its seconds, to the bit.
  """

  def __init__(
    self,
    costs: Sequence[Cost],
    capacities: Mapping[Resource, float],
    num_lanes: int,
  ):
    """Starts with nothing running.

    Args:
      costs: what each task takes.
      capacities: what there is of each resource, per second; of others there
        is no end.
      num_lanes: how many tasks run at once, at most.
    """
    self._seconds = [cost.seconds for cost in costs]
    self._capacities = dict(capacities)
    rates = [_rates(cost, capacities) for cost in costs]
    # Equal rates have one number, and 0 is that of no rates.
    self._distinct = [*dict.fromkeys([(), *rates])]
    numbers = {of_task: i for i, of_task in enumerate(self._distinct)}
    self._numbers = [numbers[of_task] for of_task in rates]
    self._known: dict[tuple[int, ...], tuple[tuple[int, float], ...]] = {}
    self._changed = False
    self._running = [_IDLE] * num_lanes
    self._ends_s = [math.inf] * num_lanes
    self._speeds = [1.0] * num_lanes
    self._left_s = [0.0] * num_lanes
    self._since_s = [0.0] * num_lanes

  def start(self, lane: int, task: int, now_s: float) -> None:
    """Starts a task on a lane that is free."""
    assert self._running[lane] == _IDLE
    self._running[lane] = self._numbers[task]
    self._left_s[lane] = self._seconds[task]
    self._since_s[lane] = now_s
    self._speeds[lane] = 1.0
    self._ends_s[lane] = now_s + self._seconds[task]
    self._changed = self._changed or self._numbers[task] > 0

  def is_free(self, lane: int) -> bool:
    """Says whether a lane runs nothing."""
    return self._running[lane] == _IDLE

  def next_end_s(self, now_s: float) -> float:
    """Returns when the next task ends if none starts before; inf if none runs.

    Args:
      now_s: the time at which the last tasks started or were taken off.
    """
    if self._changed:
      self._share(now_s)
      self._changed = False
    return min(self._ends_s)

  def take_ended(self, now_s: float) -> list[int]:
    """Frees the lanes whose tasks have ended by now, and returns them."""
    lanes = [lane for lane, end_s in enumerate(self._ends_s) if end_s <= now_s]
    for lane in lanes:
      self._changed = self._changed or self._running[lane] > 0
      self._running[lane] = _IDLE
      self._ends_s[lane] = math.inf
    return lanes

  def _share(self, now_s: float) -> None:
    for lane, speed in self._fair_speeds():
      if speed != self._speeds[lane]:
        self._set_speed(lane, speed, now_s)

  def _set_speed(self, lane: int, speed: float, now_s: float) -> None:
    done_s = self._speeds[lane] * (now_s - self._since_s[lane])
    self._left_s[lane] = max(self._left_s[lane] - done_s, 0.0)
    self._since_s[lane] = now_s
    self._speeds[lane] = speed
    self._ends_s[lane] = now_s + self._left_s[lane] / speed

  def _fair_speeds(self) -> Iterable[tuple[int, float]]:
    """Returns the speeds of what runs; the same tasks often run together."""
    running = tuple(self._running)
    known = self._known.get(running)
    if known is None:
      lanes = [lane for lane, number in enumerate(running) if number > 0]
      rates = [self._distinct[running[lane]] for lane in lanes]
      speeds = max_min_speeds(rates, self._capacities)
      known = self._known[running] = (*zip(lanes, speeds, strict=True),)
    return known


def _rates(cost: Cost, capacities: Mapping[Resource, float]) -> Rates:
  return tuple(
    (resource, amount / cost.seconds)
    for resource, amount in cost.uses.items()
    if amount > 0 and resource in capacities
  )
