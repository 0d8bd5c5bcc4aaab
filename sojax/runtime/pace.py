"""When tasks of an emulated device begin and end, planned when they are issued.

A task of the device, or of the link, ends at a time that is known when it is
issued: it begins now, or when its lane is free, or when the last emulated task
that it consumes has ended, and takes the seconds it is given. A thread that
waits for that time, and wakes up late, delays nothing that was issued before:
lateness does not add up, as it would if every task slept for its seconds.
"""

import collections
import threading
import time
from collections.abc import Iterable, Sequence

from sojax.graph.graph import Lane, StepGraph, Task
from sojax.plan.costs import Cost

EMULATED: tuple[Lane, ...] = (Lane.DEVICE, Lane.D2H, Lane.H2D)
"""The lanes whose tasks only take time."""

Interval = tuple[float, float]


class Pace:
  """Plans the emulated tasks of steps that follow each other."""

  def __init__(
    self, graph: StepGraph, costs: Sequence[Cost], *, num_steps: int
  ):
    """Begins with lanes that are free.

    Args:
      graph: the step graph.
      costs: see `set_costs`.
      num_steps: steps that are remembered, at least 2.

    Raises:
      ValueError: if the costs do not fit to the graph, or a task runs on a lane
        that is neither emulated nor the host's.
    """
    self._tasks = graph.tasks
    for task in graph.tasks:
      if task.lane not in (*EMULATED, Lane.HOST):
        raise ValueError(
          f"[{task.name}] runs on lane {task.lane!r}, which is only simulated;"
          f" use lanes {[str(lane) for lane in (*EMULATED, Lane.HOST)]}"
        )
    self.set_costs(costs)
    self._lane_ends_s: dict[Lane, float] = dict.fromkeys(EMULATED, 0.0)
    self._planned: collections.OrderedDict[int, dict[int, Interval]] = (
      collections.OrderedDict()
    )
    self._num_steps = num_steps
    self._lock = threading.Lock()  # two threads issue

  def set_costs(self, costs: Sequence[Cost]) -> None:
    """Says how long tasks take that are issued from now on.

    Args:
      costs: one for each task; of those of the host nothing is used.

    Raises:
      ValueError: if there are not as many costs as tasks, or a task's seconds
        are negative.
    """
    if len(costs) != len(self._tasks):
      raise ValueError(
        f"{len(costs)} costs for {len(self._tasks)} tasks; give one for each"
      )
    for task, cost in zip(self._tasks, costs, strict=True):
      if not cost.seconds >= 0:
        raise ValueError(
          f"[{task.name}] takes {cost.seconds} s; give 0 or more"
        )
    self._seconds = [cost.seconds for cost in costs]

  def begin(self, task: Task, step: int) -> float:
    """Issues an emulated task; returns when it will end.

    What it depends on has been issued, if it is emulated, or else has ended.

    Args:
      task: the task.
      step: number of its step.

    Returns:
      The time, in seconds of time.perf_counter().
    """
    with self._lock:
      start_s = max(
        time.perf_counter(),
        self._lane_ends_s[task.lane],
        *self._ends_s(step, task.deps),
        *self._ends_s(step - 1, task.prev_deps),
      )
      end_s = start_s + self._seconds[task.index]
      self._lane_ends_s[task.lane] = end_s
      self._of_step(step)[task.index] = start_s, end_s
      return end_s

  def planned(self, step: int) -> dict[int, Interval]:
    """Returns start and end of a step's emulated tasks, by their index."""
    with self._lock:
      return dict(self._planned.get(step, {}))

  def _ends_s(self, step: int, tasks: Iterable[int]) -> list[float]:
    planned = self._planned.get(step, {})
    return [planned[index][1] for index in tasks if index in planned]

  def _of_step(self, step: int) -> dict[int, Interval]:
    if step not in self._planned:
      self._planned[step] = {}
      if len(self._planned) > self._num_steps:
        self._planned.popitem(last=False)
    return self._planned[step]


def sleep_until(time_s: float) -> None:
  """Returns when time.perf_counter() has reached a time.

  The one sleep of the runtime: what it emulates has no event to wait for.
  """
  while (left_s := time_s - time.perf_counter()) > 0:
    time.sleep(left_s)
