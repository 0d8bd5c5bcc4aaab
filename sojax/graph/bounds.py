"""How short a step can be: a bound that is found without simulating steps."""

import dataclasses
import math
from collections.abc import Sequence

from sojax.graph.graph import Lane, StepGraph, TaskKind, waits_for_end

_EVER = -math.inf  # of what does not wait for the task that is followed
_STARTED_OTHERWISE = (Lane.NETWORK, Lane.HOST)


def shortest_step_s(
  graph: StepGraph, seconds: Sequence[float], dispatch_s: float = 0.0
) -> float:
  """Returns seconds that no step of a steady state can be shorter than.

  In O(edges). Of one that repeats: where steps never do, a mean of some counts.

  The longer of two: what its busiest lane takes; and the longest way from
  Validate, or from the first program, to the same in the next step, over what
  tasks wait for, what their lane runs before, and what their thread issues
  before. Tasks that share memories take longer than alone, and on lanes that
  two threads issue to one may wait for the other's: neither is counted.

  Args:
    graph: the tasks of a step.
    seconds: what each takes alone, at least.
    dispatch_s: as `simulate` takes it.

  >>> from sojax.graph.graph import Task
  >>> first = Task(index=0, kind=TaskKind.FORWARD, lane=Lane.DEVICE,
  ...              prev_deps=(1,))
  >>> second = Task(index=1, kind=TaskKind.HOST_UPDATE, lane=Lane.HOST,
  ...               deps=(0,))
  >>> shortest_step_s(StepGraph((first, second)), [2.0, 3.0])
  5.0
  """
  busy_s = dict.fromkeys(Lane, 0.0)
  for task, of_task in zip(graph.tasks, seconds, strict=True):
    busy_s[task.lane] += of_task
  walk = _Walk(graph, seconds, dispatch_s)
  sources = [t.index for t in graph.tasks if t.kind is TaskKind.VALIDATE]
  sources += [t.index for t in graph.tasks if t.lane is Lane.DEVICE][:1]
  return max(*busy_s.values(), *(walk.way_s(source) for source in sources))


@dataclasses.dataclass
class _Ends:
  """When the tasks of one step were issued and ended, at the earliest."""

  issued_s: list[float]
  ends_s: list[float]


class _Walk:
  """Follows what waits for one task, to the same one in the next step."""

  def __init__(
    self, graph: StepGraph, seconds: Sequence[float], dispatch_s: float
  ):
    self._tasks = graph.tasks
    self._seconds = seconds
    self._by_host = [graph.host_thread_issues(task) for task in graph.tasks]
    self._dispatch_s = [
      dispatch_s if of_task and task.lane not in _STARTED_OTHERWISE else 0.0
      for task, of_task in zip(graph.tasks, seconds, strict=True)
    ]

  def way_s(self, source: int) -> float:
    """Returns the longest time from a task's start to its next start."""
    num = len(self._tasks)
    self._threads_s = {False: _EVER, True: _EVER}
    self._lanes_s: dict[tuple[Lane, bool], float] = {}
    nothing = _Ends([_EVER] * num, [_EVER] * num)
    first = _Ends([_EVER] * num, [_EVER] * num)
    self._run(source, 0.0, first)
    for index in range(source + 1, num):
      self._run(index, self._start_s(index, first, nothing), first)
    second = _Ends([_EVER] * num, [_EVER] * num)
    for index in range(source):
      self._run(index, self._start_s(index, second, first), second)
    return self._start_s(source, second, first)

  def _start_s(self, index: int, step: _Ends, before: _Ends) -> float:
    """Issues a task, and returns when it can start."""
    task, side = self._tasks[index], self._by_host[index]
    thread_s = self._threads_s[side]
    start_s = _EVER
    for ends, deps in ((step, task.deps), (before, task.prev_deps)):
      for dep in deps:
        end_s = ends.ends_s[dep]
        start_s = max(start_s, end_s)
        ended = waits_for_end(task, self._tasks[dep])
        thread_s = max(thread_s, end_s if ended else ends.issued_s[dep])
    issued_s = thread_s + self._dispatch_s[index]
    step.issued_s[index] = self._threads_s[side] = issued_s
    if self._seconds[index]:
      start_s = max(start_s, self._lanes_s.get((task.lane, side), _EVER))
    return max(start_s, issued_s)

  def _run(self, index: int, start_s: float, step: _Ends) -> None:
    task, side = self._tasks[index], self._by_host[index]
    step.ends_s[index] = end_s = start_s + self._seconds[index]
    if self._seconds[index]:
      self._lanes_s[task.lane, side] = end_s
      if task.lane is Lane.HOST:  # the thread runs it itself
        self._threads_s[side] = end_s
