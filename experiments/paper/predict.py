"""Predicts what a system does on a machine: what fits, and its step."""

import dataclasses
import functools
import math
from collections.abc import Iterator

from experiments.paper.systems import System, Transform
from sojax.graph.collectives import with_collectives
from sojax.graph.graph import StepGraph
from sojax.graph.prices import price
from sojax.graph.schedule import schedule
from sojax.graph.simulate import Simulation, simulate
from sojax.plan.buckets import Layout
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Costs, step_bytes
from sojax.plan.hardware import Curve, HardwareProfile
from sojax.plan.network import collective_bytes
from sojax.plan.plan import Plan
from sojax.plan.records import BYTES_PER_PARAM
from sojax.plan.workload import Workload
from sojax.planner.problem import Problem


@dataclasses.dataclass(frozen=True)
class Prediction:
  """A simulated step of a system.

  Attributes:
    plan: the plan, with its device buckets.
    simulation: the steps.
  """

  plan: Plan
  simulation: Simulation

  @property
  def step_s(self) -> float:
    """Seconds of a step of the steady state."""
    return self.simulation.step_s


def predict(
  system: System,
  workload: Workload,
  config: TrainConfig,
  profile: HardwareProfile,
) -> Prediction | None:
  """Simulates a system's first plan that fits.

  Args:
    system: which.
    workload: the model and the batch.
    config: what is trained.
    profile: the machine.

  Returns:
    The prediction of the fastest of its shares of device buckets, or None if
    no plan fits.
  """
  if system.recomputes_all:
    workload = _recomputing_all(workload)
  for plan in system.plans:
    found = [
      _simulated(system, variant, workload, config, profile)
      for variant in _variants(system, plan, workload, config)
      if fits(system, variant, workload, config, profile)
    ]
    if found:
      return min(found, key=lambda prediction: prediction.step_s)
  return None


def fitting_plan(
  system: System,
  workload: Workload,
  config: TrainConfig,
  profile: HardwareProfile,
) -> Plan | None:
  """Returns a system's first plan that fits, None if there is none."""
  for plan in system.plans:
    for variant in _variants(system, plan, workload, config):
      if fits(system, variant, workload, config, profile):
        return variant
  return None


def fits(
  system: System,
  plan: Plan,
  workload: Workload,
  config: TrainConfig,
  profile: HardwareProfile,
) -> bool:
  """Says whether a plan of a system fits a device and its share of the host.

  As the planner says it: with what programs need while they run.
  """
  problem = Problem(workload=workload, config=config, profile=profile)
  if system.free_records:
    plan = dataclasses.replace(plan, speculation="wait")
  account = problem.account(workload.layout(plan, config), plan)
  return not problem.shortages(account)


def machine_of(
  system: System, plan: Plan, config: TrainConfig, profile: HardwareProfile
) -> HardwareProfile:
  """Returns the machine as a system uses it."""
  rates = dict(profile.host_rates)
  moved = step_bytes(plan, config)
  if system.step_s_per_param is not None:
    rates["step"] = Curve.flat(moved / system.step_s_per_param)
  if system.cast_bytes_per_s is not None:
    rates["widen"] = rates["narrow"] = Curve.flat(system.cast_bytes_per_s)
  if system.free_records:
    for name, record in BYTES_PER_PARAM.items():
      rates[name] = rates["step"].scaled((moved + record) / moved)
  return dataclasses.replace(profile, host_rates=rates)


def _variants(
  system: System, plan: Plan, workload: Workload, config: TrainConfig
) -> Iterator[Plan]:
  """Yields a plan with each number of device buckets."""
  plan = dataclasses.replace(
    plan, bucket_bytes=plan.bucket_bytes * workload.num_ranks
  )
  if plan.weights == "flow":
    yield plan
    return
  layout = workload.layout(plan, config)
  number = sum(bucket.trained for bucket in layout.buckets)
  for count in sorted({math.ceil(x * number) for x in system.device_shares}):
    yield dataclasses.replace(plan, device_buckets=count)


@functools.lru_cache(maxsize=64)
def _layout_and_graph(
  plan: Plan,
  workload: Workload,
  config: TrainConfig,
  transforms: tuple[Transform, ...],
  overlaps_collectives: bool,
) -> tuple[Layout, StepGraph]:
  layout = workload.layout(plan, config)
  graph = schedule(layout, plan, config, workload.input_bytes)
  if workload.num_ranks > 1:
    carried = collective_bytes(layout, config, workload.needs)
    graph = with_collectives(graph, carried, overlapped=overlaps_collectives)
  for transform in transforms:
    graph = transform(graph, layout)
  return layout, graph


def _simulated(
  system: System,
  plan: Plan,
  workload: Workload,
  config: TrainConfig,
  profile: HardwareProfile,
) -> Prediction:
  layout, graph = _layout_and_graph(
    plan, workload, config, system.transforms, system.overlaps_collectives
  )
  machine = machine_of(system, plan, config, profile)
  costs = Costs(layout, plan, config, workload, machine)
  simulation = simulate(
    graph,
    price(graph, costs),
    capacities=machine.capacities,
    dispatch_s=machine.dispatch_s,
  )
  return Prediction(plan, simulation)


def _recomputing_all(workload: Workload) -> Workload:
  stages = tuple(
    dataclasses.replace(stage, recompute_flops=None)
    for stage in workload.stages
  )
  return dataclasses.replace(workload, stages=stages)
