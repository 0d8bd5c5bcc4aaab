"""Puts the collectives of several devices into a step graph, to simulate them.

On several devices a stage's program gathers the weights that it needs when it
begins, and adds up gradients over the devices when it ends. The step graph has
programs only. Here collectives become tasks of a lane of their own:

    AllGather(use) -> use, a forward or a backward
    Backward(stage) -> ReduceScatter(stage) -> GradOut, Validate, DeviceUpdate
"""

import dataclasses
from collections.abc import Iterable

from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.plan.network import CollectiveBytes

_USES = (TaskKind.FORWARD, TaskKind.BACKWARD)
_MAKE_WEIGHTS = (
  TaskKind.WEIGHT_IN,
  TaskKind.WEIGHT_RESEND,
  TaskKind.DEVICE_UPDATE,
)
_TAKE_GRADIENTS = (
  TaskKind.GRAD_OUT,
  TaskKind.VALIDATE,
  TaskKind.HOST_UPDATE,
  TaskKind.DEVICE_UPDATE,
)


def with_collectives(
  graph: StepGraph, carried: CollectiveBytes, *, overlapped: bool
) -> StepGraph:
  """Returns a step graph with its collectives.

  Args:
    graph: the step graph of one device.
    carried: bytes of the collectives; a stage of 0 bytes has none.
    overlapped: whether collectives run beside programs. If not, they run when
      those that they are part of do: a gather waits for all that its use waits
      for, and the next use for the scatter of the one before. If they do, a
      use's weights are gathered while the use before computes, and no earlier;
      and scatters hold up only those who take the gradients. Gradients that
      backward itself delivers to the host do not wait for the scatter.

  Returns:
    The graph; its tasks are those of `graph` in their order, with others in
    between.
  """
  builder = _Builder(graph, carried, overlapped)
  for task in graph.tasks:
    builder.add(task)
  return builder.graph()


class _Builder:
  """Copies tasks and adds collectives.

  Until the end tasks are named by their index in the old graph, and those that
  are new by negative numbers.
  """

  def __init__(
    self, graph: StepGraph, carried: CollectiveBytes, overlapped: bool
  ):
    self._old = graph.tasks
    self._carried = carried
    self._overlapped = overlapped
    self._uses = [task.index for task in graph.tasks if task.kind in _USES]
    self._num_uses = 0
    self._scatters: dict[int, int] = {}
    self._names: list[int] = []
    self._tasks: list[Task] = []

  def add(self, task: Task) -> None:
    if task.kind in _USES:
      self._add_use(task)
      return
    if task.kind in _TAKE_GRADIENTS:
      scattered = [self._scatters.get(dep, dep) for dep in task.deps]
      task = dataclasses.replace(task, deps=tuple(scattered))
    self._append(task, task.index)

  def graph(self) -> StepGraph:
    place = {name: index for index, name in enumerate(self._names)}
    return StepGraph(
      tuple(
        dataclasses.replace(
          task,
          index=index,
          deps=tuple(place[dep] for dep in task.deps),
          prev_deps=tuple(place[dep] for dep in task.prev_deps),
        )
        for index, task in enumerate(self._tasks)
      )
    )

  def _add_use(self, use: Task) -> None:
    assert use.stage is not None
    deps = use.deps
    if not self._overlapped:
      deps += tuple(self._scatters[d] for d in deps if d in self._scatters)
    forward = use.kind is TaskKind.FORWARD
    by_stage = self._carried.forward if forward else self._carried.backward
    if by_stage[use.stage]:
      gather = self._gather(dataclasses.replace(use, deps=deps))
      deps += (self._append(gather, None, by_stage[use.stage]),)
    self._append(dataclasses.replace(use, deps=deps), use.index)
    self._num_uses += 1
    if not forward and self._carried.scatter[use.stage]:
      scatter = dataclasses.replace(
        use,
        kind=TaskKind.REDUCE_SCATTER,
        lane=Lane.NETWORK,
        deps=(use.index,),
        prev_deps=(),
      )
      self._scatters[use.index] = self._append(
        scatter, None, self._carried.scatter[use.stage]
      )

  def _gather(self, use: Task) -> Task:
    """Returns the gather of a use, which may still wait for all that it does.

    If it runs beside programs it waits for the weights, and until the use
    before the one before has ended: so the weights of two uses are there.
    """
    deps, prev_deps = use.deps, use.prev_deps
    if self._overlapped:
      deps, prev_deps = self._weights(deps), self._weights(prev_deps)
      before = self._num_uses - 2
      if before >= 0:
        deps += (self._uses[before],)
      elif -before <= len(self._uses):
        prev_deps += (self._uses[before],)
    return dataclasses.replace(
      use,
      kind=TaskKind.ALL_GATHER,
      lane=Lane.NETWORK,
      deps=deps,
      prev_deps=prev_deps,
    )

  def _weights(self, deps: Iterable[int]) -> tuple[int, ...]:
    return tuple(
      dep for dep in deps if dep >= 0 and self._old[dep].kind in _MAKE_WEIGHTS
    )

  def _append(self, task: Task, name: int | None, carried: int = 0) -> int:
    """Appends a task, of the old graph or a collective; returns its name."""
    if name is None:
      name = -1 - len(self._tasks)
      task = dataclasses.replace(task, bytes=carried)
    self._names.append(name)
    self._tasks.append(task)
    return name
