"""Executes step graphs: issues tasks in schedule order, stamps their ends.

Two threads issue work. The caller's thread issues all device programs, and
transfers that do not come from a host update; it is the only one that
dispatches programs, in schedule order. The host thread runs host updates and
sends their results. One waiter thread per asynchronous lane waits for
completion. Nobody polls: every wait is on a condition that each completion and
each failure notifies.
"""

import collections
import enum
import threading
import time
from collections.abc import Callable, Mapping

from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.graph.timeline import Span, Timeline
from sojax.runtime.lanes import Waiter
from sojax.runtime.step import Step

Wait = Callable[[], None]
Action = Callable[[Task, Step], Wait | None]
"""Issues a task. What it returns blocks until the task is complete; None if it
is complete already."""

_ASYNC_LANES = (Lane.DEVICE, Lane.D2H, Lane.H2D)
TIMELINE_STEPS = 64
"""Steps whose spans are kept."""


class StepError(RuntimeError):
  """A task of a step failed; the cause is chained.

  Attributes:
    step: number of the step.
    task: name of the task.
    data: the step itself.
  """

  def __init__(self, step: Step, task: Task):
    self.step = step.number
    self.task = task.name
    self.data = step
    super().__init__(step.number, task.name)

  @property
  def intact(self) -> bool:
    """Whether the state is still the one before the step.

    If not, the trainer must be restored from a checkpoint.
    """
    return not self.data.committed

  def __str__(self) -> str:
    state = (
      "the state is the one before it"
      if self.intact
      else "the state was already changing: restore a checkpoint"
    )
    return f"step {self.step} failed in [{self.task}]; {state}"


class _Progress(enum.IntEnum):
  PENDING = 0
  ISSUED = 1
  DONE = 2


class StepRun:
  """One execution of the graph.

  Attributes:
    step: the data that its tasks share.
    failure: why it stopped, or None.
  """

  def __init__(
    self,
    graph: StepGraph,
    step: Step,
    previous: "StepRun | None",
    changed: threading.Condition,
  ):
    self.step = step
    self.failure = None if previous is None else previous.failure
    self._graph = graph
    self._previous = previous
    self._changed = changed
    self._progress = [_Progress.PENDING] * len(graph.tasks)
    self._num_done = 0
    self._ends_s: dict[int, float] = {}
    self._spans: list[Span] = []

  def wait_done(self, wanted: Callable[[Task], bool] = lambda _: True) -> None:
    """Waits for the end of the wanted tasks, by default all.

    Raises:
      StepError: if one of them did not end, since a task of this step or of one
        before it failed.
    """
    indices = [task.index for task in self._graph.tasks if wanted(task)]

    def done() -> bool:
      return all(self._progress[i] is _Progress.DONE for i in indices)

    with self._changed:
      self._changed.wait_for(lambda: self.failure or done())
      if not done():
        assert self.failure is not None
        raise self.failure

  def wait_until_ready(self, task: Task) -> None:
    """Waits for what a task needs before it can be issued.

    Raises:
      StepError: if this step failed.
    """
    with self._changed:
      self._changed.wait_for(lambda: self.failure or self._ready(task))
      if self.failure is not None:
        raise self.failure

  def timeline(self) -> Timeline:
    """Returns the spans of the tasks that have ended."""
    with self._changed:
      return Timeline(self._spans)

  def issued(self, task: Task) -> None:
    """Records that a task's arrays exist, though perhaps not their values."""
    with self._changed:
      self._progress[task.index] = _Progress.ISSUED
      self._changed.notify_all()

  def done(self, task: Task, issued_s: float, lane_free_s: float) -> float:
    """Records the end of a task; returns the time.

    Args:
      task: the task.
      issued_s: when it was issued.
      lane_free_s: when its lane ended the task before it.
    """
    end_s = time.perf_counter()
    with self._changed:
      before = [self._ends_s.get(dep, 0.0) for dep in task.deps]
      start_s = min(end_s, max([issued_s, lane_free_s, *before]))
      self._ends_s[task.index] = end_s
      self._spans.append(
        Span(
          name=task.name,
          lane=str(task.lane),
          step=self.step.number,
          start_s=start_s,
          end_s=end_s,
          bytes=task.bytes,
        )
      )
      self._progress[task.index] = _Progress.DONE
      self._num_done += 1
      if self._num_done == len(self._progress):
        self._previous = None
        self.step.release()
      self._changed.notify_all()
    return end_s

  def fail(self, failure: StepError) -> None:
    """Stops the step; the first failure stays."""
    with self._changed:
      if self.failure is None and self._num_done < len(self._progress):
        self.failure = failure
      self._changed.notify_all()

  def _ready(self, task: Task) -> bool:
    previous = self._previous
    return all(self._satisfied(dep, task) for dep in task.deps) and (
      previous is None
      or all(previous._satisfied(dep, task) for dep in task.prev_deps)
    )

  def _satisfied(self, dep: int, task: Task) -> bool:
    """Says whether `task` may be issued as far as `dep` is concerned.

    JAX itself orders what consumes the arrays of programs and of transfers to
    the device behind them; everything else waits for the end. So does Validate,
    which needs the outcome of the one before on the host.
    """
    before = self._graph.tasks[dep]
    consumes_arrays = task.lane in (Lane.DEVICE, Lane.D2H)
    makes_arrays = before.lane in (Lane.DEVICE, Lane.H2D)
    if task.kind is before.kind is TaskKind.VALIDATE:
      needed = _Progress.DONE
    elif consumes_arrays and makes_arrays:
      needed = _Progress.ISSUED
    else:
      needed = _Progress.DONE
    return self._progress[dep] >= needed


class Executor:
  """Runs steps of one graph, several in flight."""

  def __init__(self, graph: StepGraph, actions: Mapping[TaskKind, Action]):
    """Starts the threads.

    Args:
      graph: the step graph.
      actions: how to issue each kind of task.
    """
    self._graph = graph
    self._actions = actions
    self._tasks: dict[bool, list[Task]] = {True: [], False: []}
    for task in graph.tasks:
      self._tasks[_on_host_thread(graph, task)].append(task)
    self._changed = threading.Condition()
    self._waiters = {lane: Waiter(lane) for lane in _ASYNC_LANES}
    self._host = Waiter("host-issue")
    self._lane_free_s = dict.fromkeys(Lane, 0.0)
    self._newest: StepRun | None = None
    self._recent: collections.deque[StepRun] = collections.deque(
      maxlen=TIMELINE_STEPS
    )

  def run(self, step: Step) -> StepRun:
    """Starts a step; returns when everything the caller issues is issued.

    Raises:
      StepError: if an earlier step failed, or this one did while its tasks
        were issued.
    """
    self.raise_if_failed()
    with self._changed:
      run = StepRun(self._graph, step, self._newest, self._changed)
      self._newest = run
      self._recent.append(run)
    self._host.submit(lambda: self._issue_all(self._tasks[True], run))
    self._issue_all(self._tasks[False], run)
    self.raise_if_failed()
    return run

  def drain(self) -> None:
    """Waits for all steps.

    Raises:
      StepError: if one of them failed.
    """
    if self._newest is not None:
      try:
        self._newest.wait_done()
      except StepError:
        self.raise_if_failed()

  def raise_if_failed(self) -> None:
    """Raises the failure of a step, if there is one.

    A failure that left the state intact is raised once; then steps go on from
    that state.
    """
    failures = [run.failure for run in self._recent if run.failure]
    if not failures:
      return
    self.settle()
    if failures[0].intact:
      self.forget_failure()
    raise failures[0]

  def forget_failure(self) -> None:
    """Lets steps go on, after a failure that was dealt with."""
    self.settle()
    self._recent = collections.deque(
      (run for run in self._recent if run.failure is None),
      maxlen=TIMELINE_STEPS,
    )
    self._newest = self._recent[-1] if self._recent else None

  def timeline(self) -> Timeline:
    """Returns the spans of the newest steps."""
    return Timeline(
      span for run in list(self._recent) for span in run.timeline().spans
    )

  def close(self) -> None:
    """Ends the threads after what was issued; may be called again."""
    self._host.close()
    for waiter in self._waiters.values():
      waiter.close()

  def settle(self) -> None:
    """Waits until no thread works on a step any more, failed or not."""
    for waiter in (self._host, *self._waiters.values()):
      idle = threading.Event()
      waiter.submit(idle.set)
      idle.wait()

  def _issue_all(self, tasks: list[Task], run: StepRun) -> None:
    for task in tasks:
      try:
        run.wait_until_ready(task)
        self._issue(task, run)
      except StepError:
        return
      except BaseException as error:
        self._fail(task, run, error)
        if not isinstance(error, Exception):
          raise
        return

  def _issue(self, task: Task, run: StepRun) -> None:
    issued_s = time.perf_counter()
    wait = self._actions[task.kind](task, run.step)
    if wait is None:
      self._done(task, run, issued_s)
      return
    run.issued(task)

    def complete() -> None:
      try:
        wait()
      except Exception as error:
        self._fail(task, run, error)
      else:
        self._done(task, run, issued_s)

    self._waiters[task.lane].submit(complete)

  def _done(self, task: Task, run: StepRun, issued_s: float) -> None:
    self._lane_free_s[task.lane] = run.done(
      task, issued_s, self._lane_free_s[task.lane]
    )

  def _fail(self, task: Task, run: StepRun, error: BaseException) -> None:
    """Stops a step and those after it, which build on it."""
    failure = StepError(run.step, task)
    failure.__cause__ = error
    with self._changed:
      runs = list(self._recent)
      for later in runs[runs.index(run) :]:
        later.fail(failure)


def _on_host_thread(graph: StepGraph, task: Task) -> bool:
  """Host updates, and the transfers that send their results."""
  return task.lane is Lane.HOST or any(
    graph.tasks[dep].lane is Lane.HOST for dep in task.deps
  )
