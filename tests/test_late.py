"""Late updates in simulated steps; hand-worked, in seconds."""

from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.graph.late import simulate_late
from sojax.plan.costs import Cost

K = TaskKind


def graph():
  """A backward of 10 s, gradients of three buckets at once, and updates."""
  tasks = [
    Task(index=0, kind=K.BACKWARD, lane=Lane.DEVICE, prev_deps=(8, 9, 10)),
    *(
      Task(index=i, kind=K.GRAD_OUT, lane=Lane.D2H, bucket=i, deps=())
      for i in (1, 2, 3)
    ),
    *(
      Task(index=i, kind=K.HOST_UPDATE, lane=Lane.HOST, bucket=i - 3, deps=deps)
      for i, deps in ((4, (1,)), (5, (2,)), (6, (3,)))
    ),
    Task(index=7, kind=K.VALIDATE, lane=Lane.DEVICE, deps=(0,), prev_deps=(7,)),
    *(
      Task(
        index=i,
        kind=K.HOST_SETTLE,
        lane=Lane.HOST,
        bucket=i - 7,
        deps=(i - 4, 7),
      )
      for i in (8, 9, 10)
    ),
  ]
  return StepGraph(tuple(tasks))


def costs(update_s):
  of_kind = {K.BACKWARD: 10.0, K.HOST_UPDATE: update_s}
  return [Cost(of_kind.get(task.kind, 0.0)) for task in graph().tasks]


def late_costs(late_s):
  return {i: Cost(late_s) for i in (4, 5, 6)}


def test_updates_that_begin_before_validate_cost_the_same():
  simulation, used = simulate_late(graph(), costs(4.0), late_costs(1.0))
  # Updates begin at 0, 4 and 8 s, and the last one ends at 12.
  assert simulation.step_s == 12.0
  assert [used[i].seconds for i in (4, 5, 6)] == [4.0, 4.0, 4.0]


def test_an_update_after_validate_is_a_plain_one():
  simulation, used = simulate_late(graph(), costs(6.0), late_costs(4.0))
  # The third begins at 12 s, after Validate, which ended at 10.
  assert [used[i].seconds for i in (4, 5, 6)] == [6.0, 6.0, 4.0]
  assert simulation.step_s == 16.0


def test_without_late_costs_it_is_the_plain_simulation():
  simulation, used = simulate_late(graph(), costs(6.0), {})
  assert simulation.step_s == 18.0
  assert list(used) == costs(6.0)
