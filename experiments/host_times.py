"""What the host's tasks of a step take alone: kernels, with nothing around."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from sojax.graph.graph import Lane, Task, TaskKind
from sojax.host.speculation import SpeculativeBucket
from sojax.plan.adamw import AdamScalars, adam_scalars
from sojax.runtime.paced import COMMIT, PacedTrainer


@dataclasses.dataclass(frozen=True)
class HostSeconds:
  """Medians of what tasks of the host's lane take alone, by their index.

  Attributes:
    tasks: all of them; updates run ahead where they can.
    late: those updates, if they are too late to run ahead.
  """

  tasks: dict[int, float]
  late: dict[int, float]


def measure_host_tasks(
  trainer: PacedTrainer, *, num_passes: int
) -> HostSeconds:
  """Runs the kernels of a step's host tasks, in their order, by no executor.

  Args:
    trainer: no step may be under way. Its state goes on.
    num_passes: how often; each pass goes through all buckets, so that none of
      them is in a cache.
  """
  alone = _Alone(trainer)
  tasks = [task for task in trainer.graph.tasks if task.lane is Lane.HOST]
  ahead = [task for task in tasks if alone.runs_ahead(task)]
  return HostSeconds(
    _medians(num_passes, tasks, alone.run),
    _medians(num_passes, ahead, alone.run_late),
  )


def _medians(
  num_passes: int, tasks: Sequence[Task], run: Callable[[Task], float]
) -> dict[int, float]:
  seconds: dict[int, list[float]] = {task.index: [] for task in tasks}
  for _ in range(num_passes):
    for task in tasks:
      seconds[task.index].append(run(task))
  return {index: statistics.median(x) for index, x in seconds.items()}


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
