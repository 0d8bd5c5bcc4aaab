"""Prices a step graph: what each of its tasks costs."""

from sojax.graph.graph import StepGraph, Task, TaskKind
from sojax.plan.costs import NOTHING, Cost, Costs


def price(
  graph: StepGraph,
  costs: Costs,
  *,
  ahead: bool = True,
  taken_back: bool = False,
) -> tuple[Cost, ...]:
  """Returns the cost of each task, by its index.

  Args:
    graph: the tasks of a step.
    costs: what they cost.
    ahead: whether updates run ahead of Validate where the graph lets them. If
      not, they are left to be settled, and so are their weights.
    taken_back: whether the step is one whose updates, where they ran ahead, are
      taken again with the clip scale. Else they count.
  """
  pricing = _Pricing(graph, costs, ahead, taken_back)
  return tuple(map(pricing.cost, graph.tasks))


def price_late(graph: StepGraph, costs: Costs) -> dict[int, Cost]:
  """Returns what updates that may run ahead cost if they are too late for it.

  Args:
    graph: the tasks of a step.
    costs: what they cost.

  Returns:
    Costs by the index of the task; see `sojax.graph.late`.
  """
  settled = {
    task.bucket for task in graph.tasks if task.kind is TaskKind.HOST_SETTLE
  }
  return {
    task.index: costs.host_update(task.bucket, ahead=False)
    for task in graph.tasks
    if task.kind is TaskKind.HOST_UPDATE
    and task.bucket is not None
    and task.bucket in settled
  }


class _Pricing:
  """Says what a task costs, given what becomes of updates that run ahead."""

  def __init__(
    self, graph: StepGraph, costs: Costs, ahead: bool, taken_back: bool
  ):
    self._graph = graph
    self._costs = costs
    self._ahead = ahead
    self._settlement = "redo" if taken_back else "commit"
    if not ahead:
      self._settlement = "late"
    self._settled = {
      task.bucket for task in graph.tasks if task.kind is TaskKind.HOST_SETTLE
    }
    self._last_micro = max(task.micro for task in graph.tasks)

  def cost(self, task: Task) -> Cost:
    if task.bucket is not None:
      return self._of_bucket(task, task.bucket)
    return self._of_stage(task)

  def _of_stage(self, task: Task) -> Cost:
    costs, kind = self._costs, task.kind
    if kind is TaskKind.HOST_SCALARS:
      return costs.host_scalars()
    if kind is TaskKind.VALIDATE:
      return costs.validate()
    if kind is TaskKind.ALL_GATHER:
      return costs.all_gather(task.bytes)
    if kind is TaskKind.REDUCE_SCATTER:
      return costs.reduce_scatter(task.bytes)
    assert task.stage is not None
    if kind is TaskKind.FORWARD:
      return costs.forward(task.stage, first_micro=task.micro == 0)
    if kind is TaskKind.BACKWARD:
      return costs.backward(task.stage, task.micro == self._last_micro)
    assert kind in (TaskKind.ACTIVATION_OUT, TaskKind.ACTIVATION_IN), kind
    return costs.activation(task.stage, out=kind is TaskKind.ACTIVATION_OUT)

  def _of_bucket(self, task: Task, bucket: int) -> Cost:
    costs, kind = self._costs, task.kind
    if kind is TaskKind.GRAD_OUT:
      return costs.grad_out(bucket)
    if kind is TaskKind.HOST_ACCUMULATE:
      return costs.host_accumulate(bucket, first_micro=task.micro == 0)
    if kind is TaskKind.DEVICE_UPDATE:
      return costs.device_update(bucket)
    if kind is TaskKind.HOST_SETTLE:
      return costs.host_settle(bucket, self._settlement)
    if kind is TaskKind.WEIGHT_RESEND:
      committed = self._settlement == "commit"
      return NOTHING if committed else costs.weight_in(bucket)
    left = bucket in self._settled and not self._ahead
    if kind is TaskKind.HOST_UPDATE:
      ahead = bucket in self._settled
      return NOTHING if left else costs.host_update(bucket, ahead=ahead)
    assert kind is TaskKind.WEIGHT_IN, kind
    # Weights that flow are fetched for each use, whatever becomes of updates.
    new = any(
      self._graph.tasks[dep].kind is TaskKind.HOST_UPDATE for dep in task.deps
    )
    return NOTHING if left and new else costs.weight_in(bucket)
