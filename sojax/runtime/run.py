"""One execution of the step graph: what was issued, ended, or failed."""

import dataclasses
import enum
import threading
import time
from collections.abc import Callable

from sojax.graph.graph import StepGraph, Task, TaskKind, waits_for_end
from sojax.graph.timeline import Span, Timeline
from sojax.runtime.step import Step


class StepError(RuntimeError):
  """A task of a step failed; the cause is chained.

  Attributes:
    step: number of the step.
    task: name of the task.
    data: the step, without the arrays that only its tasks needed.
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
    return not (self.data.state_touched or self.data.speculation.in_doubt)

  def __str__(self) -> str:
    state = (
      "the state is the one before it"
      if self.intact
      else "the state was already changing: restore a checkpoint"
    )
    return f"step {self.step} failed in [{self.task}]; {state}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
  """When a step did what, in seconds of time.perf_counter().

  Attributes:
    number: of the step.
    ahead: whether updates were to run ahead of its validation.
    clipped: whether gradients were clipped, or the step skipped.
    begun_s: when the caller began it.
    first_grad_s: when the first gradients of the last micro-batch were on the
      host; nothing can be updated before.
    validated_s: when its Validate ended.
    ended_s: when all of it had.
    update_s: how long the host updated, and took updates back.
  """

  number: int
  ahead: bool
  clipped: bool
  begun_s: float
  first_grad_s: float
  validated_s: float
  ended_s: float
  update_s: float


class _Progress(enum.IntEnum):
  PENDING = 0
  ISSUED = 1
  DONE = 2


class StepRun:
  """One execution of the graph.

  Attributes:
    step: the data that its tasks share.
    failure: why it stopped, or None.
    begun_s: when it was begun.
    dispatched: whether the caller has issued all its tasks, or given up.
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
    self.dispatched = False
    self._graph = graph
    self._previous = previous
    self._changed = changed
    self._progress = [_Progress.PENDING] * len(graph.tasks)
    self._num_done = 0
    self.begun_s = time.perf_counter()
    self._ended_s = self.begun_s
    self._update_s = 0.0
    self._ends_s: dict[int, float] = {}
    self._earliest_s: dict[int, float] = {}
    self._previous_ends_s = {} if previous is None else previous._ends_s

  def wait_done(self, wanted: Callable[[Task], bool] | None = None) -> None:
    """Waits for the end of the wanted tasks, by default all.

    Raises:
      StepError: if one of them did not end, since a task of this step or of one
        before it failed.
    """
    indices = [
      task.index for task in self._graph.tasks if wanted and wanted(task)
    ]

    def done() -> bool:
      if wanted is None:
        return self._num_done == len(self._progress)
      return all(self._progress[i] is _Progress.DONE for i in indices)

    with self._changed:
      self._changed.wait_for(lambda: self.failure or done())
      if not done():
        assert self.failure is not None
        raise self.failure

  def wait_ended(self) -> None:
    """Waits until all tasks have ended, or this step has failed.

    One that builds on a step that has failed may be both.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self.failure or self._num_done == len(self._progress)
      )

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
      return Timeline(
        self._span(self._graph.tasks[index]) for index in self._ends_s
      )

  def times(self) -> StepTimes | None:
    """Returns when it did what; None until it has ended.

    A step without gradients on the host began to have them with Validate.
    """
    with self._changed:
      if self._num_done < len(self._progress):
        return None
    verdict = self.step.host_verdict
    assert verdict is not None
    tasks = self._graph.tasks
    grads = [task for task in tasks if task.kind is TaskKind.GRAD_OUT]
    last_micro = max((task.micro for task in grads), default=0)
    ends_s: dict[TaskKind, float] = {}
    for task in tasks:
      if task.kind is TaskKind.VALIDATE or (
        task.kind is TaskKind.GRAD_OUT and task.micro == last_micro
      ):
        ends_s.setdefault(task.kind, self._ends_s[task.index])
    validated_s = ends_s[TaskKind.VALIDATE]
    return StepTimes(
      number=self.step.number,
      ahead=self.step.speculation.wanted,
      clipped=verdict.clipped or not verdict.finite,
      begun_s=self.begun_s,
      first_grad_s=ends_s.get(TaskKind.GRAD_OUT, validated_s),
      validated_s=validated_s,
      ended_s=self._ended_s,
      update_s=self._update_s,
    )

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
      self._ends_s[task.index] = end_s
      self._earliest_s[task.index] = max(issued_s, lane_free_s)
      self._progress[task.index] = _Progress.DONE
      self._num_done += 1
      if task.kind in (TaskKind.HOST_UPDATE, TaskKind.HOST_SETTLE):
        self._update_s += end_s - issued_s
      if self._num_done == len(self._progress):
        self._ended_s = end_s
        self._previous = None
        self.step.release()
        self.step.other_before = ()
      self._changed.notify_all()
    return end_s

  def fail(self, failure: StepError) -> None:
    """Stops the step, unless it has ended or failed before."""
    with self._changed:
      if self.failure is None and self._num_done < len(self._progress):
        self.failure = failure
      self._changed.notify_all()

  def _span(self, task: Task) -> Span:
    """Returns when a task ran, which is known once its waits have ended.

    It started when it had been issued, its lane was free, and the last of what
    it waits for had ended.
    """
    end_s = self._ends_s[task.index]
    starts = [self._earliest_s[task.index]]
    starts += [self._ends_s.get(dep, 0.0) for dep in task.deps]
    starts += [self._previous_ends_s.get(dep, 0.0) for dep in task.prev_deps]
    return Span(
      name=task.name,
      lane=str(task.lane),
      step=self.step.number,
      start_s=min(end_s, max(starts)),
      end_s=end_s,
      bytes=task.bytes,
      task=task.index,
      note=self.step.notes.get(task.index, ""),
    )

  def _ready(self, task: Task) -> bool:
    previous = self._previous
    return all(self._satisfied(dep, task) for dep in task.deps) and (
      previous is None
      or all(previous._satisfied(dep, task) for dep in task.prev_deps)
    )

  def _satisfied(self, dep: int, task: Task) -> bool:
    """Says whether `task` may be issued as far as `dep` is concerned."""
    ended = waits_for_end(task, self._graph.tasks[dep])
    needed = _Progress.DONE if ended else _Progress.ISSUED
    return self._progress[dep] >= needed
