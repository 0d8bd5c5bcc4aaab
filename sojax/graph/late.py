"""Simulates steps in which some updates are too late to run ahead."""

from collections.abc import Mapping, Sequence

from sojax.graph.graph import StepGraph
from sojax.graph.simulate import Simulation, simulate
from sojax.plan.costs import Cost
from sojax.plan.hardware import Resource


def simulate_late(
  graph: StepGraph,
  costs: Sequence[Cost],
  late_costs: Mapping[int, Cost],
  *,
  capacities: Mapping[Resource, float] | None = None,
  dispatch_s: float = 0.0,
) -> tuple[Simulation, tuple[Cost, ...]]:
  """Simulates steps whose late updates cost what updates after Validate cost.

  An update that may run ahead of Validate, and whose turn comes when Validate
  has ended, leaves no record.

  Args:
    graph: the step graph.
    costs: of each task, all updates that may run ahead doing so.
    late_costs: of each of these updates, by its index, if it is late.
    capacities: as `simulate` takes them.
    dispatch_s: likewise.

  Returns:
    The simulation, and the costs of the last step of its steady state.

  Raises:
    ValueError: as `simulate` does.
  """
  found = simulate(
    graph,
    costs,
    late_costs=late_costs,
    capacities=capacities,
    dispatch_s=dispatch_s,
  )
  late = found.late[found.last]
  return found, tuple(
    late_costs[index] if index in late else cost
    for index, cost in enumerate(costs)
  )
