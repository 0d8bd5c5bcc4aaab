"""What the host's tasks of a step take: kernels alone, and in the runtime.

In the runtime they also take what Python does around each of them: threads hand
over work, wake each other up, and share one interpreter.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.graph.timeline import Span, Timeline
from sojax.host.speculation import SpeculativeBucket
from sojax.plan.adamw import AdamScalars, adam_scalars
from sojax.plan.costs import Cost
from sojax.runtime.paced import COMMIT, PacedTrainer

_STALL_S = 0.02
"""Other processes may take a core for as long."""

Seconds = Mapping[int, float]
"""What tasks of the host's lane take, by their index."""


@dataclasses.dataclass(frozen=True)
class HostSeconds:
  """What the host's tasks of a step take.

  Attributes:
    tasks: all of them; updates run ahead where they can.
    late: those updates, if they are too late to run ahead.
  """

  tasks: Seconds
  late: Seconds

  def mean(self, other: "HostSeconds") -> "HostSeconds":
    """Returns the means of two measurements of the same tasks."""
    return HostSeconds(
      {i: (s + other.tasks[i]) / 2 for i, s in self.tasks.items()},
      {i: (s + other.late[i]) / 2 for i, s in self.late.items()},
    )


def measure_kernels(trainer: PacedTrainer, *, num_passes: int) -> HostSeconds:
  """Runs the kernels of a step's host tasks, in their order, by no executor.

  Args:
    trainer: no step may be under way. Its state goes on.
    num_passes: how often; each pass goes through all buckets, so that none of
      them is in a cache.
  """
  alone = _Alone(trainer)
  tasks = [task for task in trainer.graph.tasks if task.lane is Lane.HOST]
  ahead = [task for task in tasks if alone.runs_ahead(task)]

  def measure(tasks: Sequence[Task], run: Callable[[Task], float]) -> Seconds:
    return _middle(
      [{task.index: run(task) for task in tasks} for _ in range(num_passes)]
    )

  return HostSeconds(measure(tasks, alone.run), measure(ahead, alone.run_late))


def measure_in_runtime(
  trainer: PacedTrainer, kernels: HostSeconds, *, num_steps: int
) -> HostSeconds:
  """Takes steps whose device and link take no time, so that only the host does.

  New weights take half the time of an update: they arrive while the next one
  runs, as a rule, and not between the two. And first Validate takes longer than
  all updates, so that they run ahead of it; then the first gradients do, so
  that updates are late.

  Args:
    trainer: no step may be under way. Its state goes on; its costs are to be
      set again.
    kernels: what the kernels of these tasks take.
    num_steps: steps of each sort.

  Raises:
    RuntimeError: if in each step an update that was to run ahead was late: the
      machine stood still.
  """
  graph, late = trainer.graph, kernels.late
  longer = Cost(2 * sum(kernels.tasks.values()) + _STALL_S)

  def measure(held: TaskKind, *, ahead: bool) -> Seconds:
    first = next(task.index for task in graph.tasks if task.kind is held)
    costs = [Cost(_half(task, kernels.tasks)) for task in graph.tasks]
    if late:
      costs[first] = longer
    trainer.set_costs(costs)
    for _ in range(num_steps + 2):  # the first and the last do not count
      trainer.step()
    trainer.drain()
    steps = host_spans(graph, trainer.timeline())[-num_steps - 1 : -1]
    passes = [
      {
        span.task: seconds
        for span, seconds in step
        if span.task not in late or span.note.startswith("ahead") is ahead
      }
      for step in steps
    ]
    complete = max(map(len, passes))
    return _middle([x for x in passes if len(x) == complete])

  seconds = measure(TaskKind.VALIDATE, ahead=True)
  if len(seconds) != len(kernels.tasks):
    raise RuntimeError(
      f"of {len(kernels.tasks)} tasks of the host only {len(seconds)} ran"
      " before a Validate that was held back; use an idle machine"
    )
  if not late:
    return HostSeconds(seconds, {})
  of_late = measure(TaskKind.GRAD_OUT, ahead=False)
  # Where Validate waits for the host, the first update after it is never late.
  return HostSeconds(seconds, {i: of_late.get(i, seconds[i]) for i in late})


def _half(task: Task, kernels: Seconds) -> float:
  """Returns half of what the update takes whose weights a task sends, or 0."""
  if task.lane is not Lane.H2D:
    return 0.0
  return max((kernels.get(dep, 0.0) / 2 for dep in task.deps), default=0.0)


def host_spans(
  graph: StepGraph, timeline: Timeline
) -> list[list[tuple[Span, float]]]:
  """Returns the host's spans of each step, and what each of them took.

  That is from when its lane was free, and what it waits for had ended, to its
  end, though it may have been issued later. A step's first one waits for the
  caller as well: that one counts from when it was issued.
  """
  ends_s = {(span.step, span.task): span.end_s for span in timeline.spans}
  steps: dict[int, list[tuple[Span, float]]] = {}
  free_s = 0.0
  for span in timeline.spans:
    if span.lane != Lane.HOST:
      continue
    assert span.task is not None
    task = graph.tasks[span.task]
    begin_s = span.start_s
    if task.deps:
      begin_s = max(free_s, *(ends_s[span.step, dep] for dep in task.deps))
    free_s = span.end_s
    steps.setdefault(span.step, []).append((span, span.end_s - begin_s))
  return list(steps.values())


def _middle(passes: Sequence[Seconds]) -> Seconds:
  """Returns the pass whose sum is the median.

  The medians of single tasks add up to less: what delays tasks now and then
  hits another one in each pass.
  """
  return sorted(passes, key=lambda x: sum(x.values()))[len(passes) // 2]


class _Alone:
  """Calls the kernels of one task after another."""

  def __init__(self, trainer: PacedTrainer):
    self._trainer = trainer
    tasks = trainer.graph.tasks
    self._settled = {t.bucket for t in tasks if t.kind is TaskKind.HOST_SETTLE}
    self._last_micro = max(
      (t.micro for t in tasks if t.kind is TaskKind.HOST_ACCUMULATE), default=0
    )

  def run(self, task: Task) -> float:
    """Returns the seconds of a task's kernels."""
    if task.kind is TaskKind.HOST_SCALARS:
      return _seconds(self._scalars)
    if task.kind is TaskKind.HOST_ACCUMULATE:
      return _seconds(lambda: self._accumulate(task))
    if task.kind is TaskKind.HOST_SETTLE:
      bucket = self._speculative(task)
      return _seconds(lambda: bucket.commit(self._trainer.pool))
    assert task.kind is TaskKind.HOST_UPDATE, task.name
    if self.runs_ahead(task):
      return self._update(task, self._speculative(task).speculate)
    return self.run_late(task)

  def run_late(self, task: Task) -> float:
    """Returns the seconds of an update that is not to be taken back."""
    assert task.bucket is not None
    return self._update(task, self._trainer.host_buckets[task.bucket].step)

  def runs_ahead(self, task: Task) -> bool:
    """Says whether a task is an update that can run ahead."""
    return task.kind is TaskKind.HOST_UPDATE and task.bucket in self._settled

  def _update(self, task: Task, update: Callable[..., None]) -> float:
    assert task.bucket is not None
    trainer = self._trainer
    host = trainer.host_buckets[task.bucket]
    buffers = trainer.weights.buffers(host.bucket)
    grads = trainer.gradients[task.bucket]
    if trainer.sums is not None:
      grads = trainer.sums.units(host.bucket)
    assert host.bucket.group is not None
    arguments = (
      trainer.pool,
      grads,
      [buffer.shards_inout for buffer in buffers],
      self._scalars()[host.bucket.group],
      COMMIT.grad_scale,
    )
    seconds = _seconds(lambda: update(*arguments))
    trainer.weights.give_back(host.bucket.index, buffers)
    return seconds

  def _accumulate(self, task: Task) -> None:
    assert task.bucket is not None and self._trainer.sums is not None
    self._trainer.sums.add(
      self._trainer.pool,
      self._trainer.layout.buckets[task.bucket],
      self._trainer.gradients[task.bucket],
      first=task.micro == 0,
      last=task.micro == self._last_micro,
    )

  def _speculative(self, task: Task) -> SpeculativeBucket:
    assert task.bucket is not None
    bucket = self._trainer.host_buckets[task.bucket]
    assert isinstance(bucket, SpeculativeBucket)
    return bucket

  def _scalars(self) -> tuple[AdamScalars, ...]:
    trainer = self._trainer
    groups = trainer.layout.model.groups
    return tuple(adam_scalars(group, trainer.count) for group in groups)


def _seconds(call: Callable[[], object]) -> float:
  start_s = time.perf_counter()
  call()
  return time.perf_counter() - start_s
