"""What a plan takes: memory, and the time of a step."""

import dataclasses
import functools
from collections.abc import Sequence

from sojax.graph.bounds import shortest_step_s
from sojax.graph.collectives import with_collectives
from sojax.graph.critical_path import CriticalPath, critical_path
from sojax.graph.graph import StepGraph, TaskKind
from sojax.graph.late import simulate_late
from sojax.graph.prices import price, price_late
from sojax.graph.schedule import schedule
from sojax.graph.simulate import Simulation
from sojax.plan.account import Account
from sojax.plan.buckets import Layout
from sojax.plan.costs import Cost, Costs
from sojax.plan.network import CollectiveBytes, collective_bytes
from sojax.plan.plan import Plan
from sojax.planner.problem import Problem, Shortage


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
  """A plan and what it takes.

  Attributes:
    plan: the plan.
    layout: the model cut into its buckets.
    account: bytes on host and device.
    shortages: memories that it does not fit in; none if it fits.
  """

  problem: Problem
  plan: Plan
  layout: Layout
  account: Account
  shortages: tuple[Shortage, ...]

  @property
  def fits(self) -> bool:
    """Whether there is memory for it."""
    return not self.shortages

  def memory(self) -> dict[str, dict[str, int]]:
    """Returns the bytes of each memory by purpose, for one rank."""
    return self.problem.memory(self.account)

  @functools.cached_property
  def graph(self) -> StepGraph:
    """The tasks of a step; collectives are in line with programs."""
    config, workload = self.problem.config, self.problem.workload
    graph = schedule(self.layout, self.plan, config, workload.input_bytes)
    if workload.num_ranks == 1:
      return graph
    return with_collectives(graph, self._carried, overlapped=False)

  @functools.cached_property
  def compute_s(self) -> float:
    """Seconds of a step's programs and collectives, one after another.

    No step can be shorter; it is known before there is a graph.
    """
    config, workload, prices = (
      self.problem.config,
      self.problem.workload,
      self._prices,
    )
    last = config.accumulation - 1
    stages = range(workload.model.num_stages)
    seconds = 0.0
    for micro in range(config.accumulation):
      for stage in stages[:-1]:
        seconds += prices.forward(stage, first_micro=micro == 0).seconds
      for stage in stages:
        seconds += prices.backward(stage, micro == last).seconds
    if workload.num_ranks > 1:
      carried = self._carried
      gathers = [prices.all_gather(x) for x in carried.forward if x]
      gathers += [prices.all_gather(x) for x in carried.backward if x]
      scatters = [prices.reduce_scatter(x) for x in carried.scatter if x]
      of_micro = sum(cost.seconds for cost in gathers + scatters)
      seconds += config.accumulation * of_micro
    return seconds

  @functools.cached_property
  def _carried(self) -> CollectiveBytes:
    """What the collectives of each stage carry."""
    problem = self.problem
    return collective_bytes(self.layout, problem.config, problem.workload.needs)

  @functools.cached_property
  def bound_s(self) -> float:
    """Seconds that no step can be shorter than."""
    seconds = [cost.seconds for cost in self._costs]
    for index, late in self._late_costs.items():
      seconds[index] = min(seconds[index], late.seconds)
    dispatch_s = self.problem.profile.dispatch_s
    return shortest_step_s(self.graph, seconds, dispatch_s)

  @functools.cached_property
  def simulation(self) -> Simulation:
    """A step of it in the steady state."""
    profile = self.problem.profile
    found, _ = simulate_late(
      self.graph,
      self._costs,
      self._late_costs,
      capacities=profile.capacities,
      dispatch_s=profile.dispatch_s,
    )
    return found

  @functools.cached_property
  def _prices(self) -> Costs:
    problem = self.problem
    return Costs(
      self.layout,
      self.plan,
      problem.config,
      problem.workload,
      problem.profile,
      stage_seconds=problem.stage_seconds.get(str(self.plan.activations)),
    )

  @functools.cached_property
  def _costs(self) -> tuple[Cost, ...]:
    return price(self.graph, self._prices)

  @functools.cached_property
  def _late_costs(self) -> dict[int, Cost]:
    return price_late(self.graph, self._prices)

  @property
  def step_s(self) -> float:
    """Seconds of a step."""
    return self.simulation.step_s

  def seconds_of(self, *kinds: TaskKind) -> float:
    """Returns the seconds of some kinds of tasks in a step."""
    found = self.simulation
    num_steps = found.last - found.first + 1
    return (
      sum(
        found.ends_s[step][task.index] - found.starts_s[step][task.index]
        for task in self.graph.tasks
        if task.kind in kinds
        for step in range(found.first, found.last + 1)
      )
      / num_steps
    )

  @functools.cached_property
  def path(self) -> CriticalPath:
    """The critical path of its steady state."""
    found = self.simulation
    return critical_path(self.graph, found.timeline, found.first, found.last)

  @property
  def limit(self) -> str:
    """What most of a step's critical path is spent on."""
    return self.path.limit


class Evaluator:
  """Evaluates plans of one problem, each once."""

  def __init__(self, problem: Problem):
    self._problem = problem
    self._candidates: dict[Plan, Candidate] = {}

  def __call__(self, plan: Plan) -> Candidate:
    """Returns what a plan takes.

    Raises:
      ValueError: if it does not go with the model or the batch.
    """
    if plan not in self._candidates:
      problem = self._problem
      layout = problem.layout(plan)
      account = problem.account(layout, plan)
      self._candidates[plan] = Candidate(
        problem=problem,
        plan=plan,
        layout=layout,
        account=account,
        shortages=problem.shortages(account),
      )
    return self._candidates[plan]

  @property
  def simulated(self) -> Sequence[Candidate]:
    """Those whose steps were simulated."""
    return [c for c in self._candidates.values() if "simulation" in vars(c)]
