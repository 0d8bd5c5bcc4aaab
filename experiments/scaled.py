"""A step of a large model on a large machine, at a scale that fits here.

Every parameter keeps a fraction of its rows, and so does every bucket: the
step graph stays the same, task by task. Device and link get the times that the
large machine's profile gives the large model, all slowed down by one factor,
such that they are to what the host's updates take here as they are to what
these take there.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.host_times import (
  HostSeconds,
  measure_in_runtime,
  measure_kernels,
)
from sojax.graph.graph import StepGraph, TaskKind
from sojax.graph.late import simulate_late
from sojax.graph.prices import price
from sojax.graph.schedule import schedule
from sojax.graph.simulate import Simulation
from sojax.graph.timeline import Timeline
from sojax.plan.buckets import Layout, Leaf
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Cost, Costs
from sojax.plan.hardware import HardwareProfile, Resource
from sojax.plan.plan import Plan
from sojax.plan.workload import Workload
from sojax.runtime.paced import PacedTrainer

_PASSES = 3
_WARM_UP_STEPS = 2
_STEPS = 5
"""Steps of a round that are measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A plan for a large model on a large machine.

  Attributes:
    workload: the model and its batch.
    config: what is trained.
    plan: how.
    profile: the machine.
  """

  workload: Workload
  config: TrainConfig
  plan: Plan
  profile: HardwareProfile

  def layout(self) -> Layout:
    """Cuts the model into buckets."""
    return self.workload.layout(self.plan, self.config)

  def graph(self, layout: Layout) -> StepGraph:
    """Returns the step graph."""
    return schedule(layout, self.plan, self.config, self.workload.input_bytes)

  def costs(self, layout: Layout) -> Costs:
    """Returns what tasks cost on the machine."""
    return Costs(layout, self.plan, self.config, self.workload, self.profile)

  def price(self, layout: Layout, graph: StepGraph) -> tuple[Cost, ...]:
    """Returns what each task costs on the machine, updates running ahead."""
    return price(graph, self.costs(layout))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
  """How a large case becomes one of this machine.

  Attributes:
    divisor: of the rows of each parameter.
    pool_threads: threads that update buckets here.
  """

  divisor: int
  pool_threads: int

  def small(self, case: Case) -> Case:
    """Returns the case whose host side is this machine's."""
    model = case.workload.model
    leaves = tuple(self._small_leaf(leaf) for leaf in model.leaves)
    limit = case.plan.max_record_bytes
    return dataclasses.replace(
      case,
      workload=dataclasses.replace(
        case.workload, model=dataclasses.replace(model, leaves=leaves)
      ),
      plan=dataclasses.replace(
        case.plan,
        bucket_bytes=case.plan.bucket_bytes // self.divisor,
        max_record_bytes=None if limit is None else limit // self.divisor,
        pool_threads=self.pool_threads,
      ),
    )

  def _small_leaf(self, leaf: Leaf) -> Leaf:
    rows, *others = leaf.shape
    return dataclasses.replace(
      leaf, shape=(max(1, rows // self.divisor), *others)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
  """A few paced steps, and what they were to take.

  Attributes:
    measured_s: seconds of a step, from one Validate to the next: the median.
    predicted_s: the same, simulated with the host's tasks as they take in the
      runtime when the device and the link take no time.
    by_kernels_s: the same, simulated with their kernels alone.
    lower_bound_s: what the busiest lane takes for its tasks, by kernels alone.
    device_idle: the device's idle share of the time.
    predicted_device_idle: the same, simulated.
    kernels_s: what the kernels of the host's tasks take, before the steps and
      after: the mean.
    in_runtime_s: what these tasks take in the runtime, likewise.
  """

  measured_s: float
  predicted_s: float
  by_kernels_s: float
  lower_bound_s: float
  device_idle: float
  predicted_device_idle: float
  kernels_s: float
  in_runtime_s: float


@dataclasses.dataclass(frozen=True)
class _Alone:
  """What the host's tasks take while device and link take no time.

  Attributes:
    kernels: their kernels, without the runtime.
    in_runtime: the tasks, in the runtime.
  """

  kernels: HostSeconds
  in_runtime: HostSeconds

  @classmethod
  def measure(cls, trainer: PacedTrainer) -> "_Alone":
    """Measures; the trainer's costs are to be set again."""
    kernels = measure_kernels(trainer, num_passes=_PASSES)
    return cls(kernels, measure_in_runtime(trainer, kernels, num_steps=_PASSES))

  def mean(self, other: "_Alone") -> "_Alone":
    return _Alone(
      self.kernels.mean(other.kernels), self.in_runtime.mean(other.in_runtime)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """Rounds of paced steps.

  Attributes:
    slowness: what the times of device and link were multiplied by.
    bound_by: the lane that is busiest.
    lanes_s: what each lane's tasks of a step take alone, measured last.
    rounds: the rounds, in their order.
    timeline: a step of the last one.
    predicted_timeline: one of the steady state, as simulated for it.
  """

  slowness: float
  bound_by: str
  lanes_s: Mapping[str, float]
  rounds: tuple[Round, ...]
  timeline: Timeline
  predicted_timeline: Timeline

  def row(self) -> dict[str, Any]:
    """Returns medians over the rounds, also of ratios, for JSON."""

    def median(figure: Callable[[Round], float]) -> float:
      return statistics.median(map(figure, self.rounds))

    return {
      "slowness": self.slowness,
      "bound_by": self.bound_by,
      "lanes_s": dict(self.lanes_s),
      "measured_s": median(lambda x: x.measured_s),
      "predicted_s": median(lambda x: x.predicted_s),
      "lower_bound_s": median(lambda x: x.lower_bound_s),
      "device_idle": median(lambda x: x.device_idle),
      "predicted_device_idle": median(lambda x: x.predicted_device_idle),
      "measured_over_predicted": median(lambda x: x.measured_s / x.predicted_s),
      "measured_over_by_kernels": median(
        lambda x: x.measured_s / x.by_kernels_s
      ),
      "measured_over_lower_bound": median(
        lambda x: x.measured_s / x.lower_bound_s
      ),
      "rounds": [dataclasses.asdict(x) for x in self.rounds],
    }


def run_paced(case: Case, scale: Scale, *, num_rounds: int) -> Run:
  """Measures paced steps of a case, and simulates them.

  Device and link are slowed down by what the host's tasks take alone here, of
  what they take on the case's machine. They are measured alone again before and
  after each round, since a shared machine is not always as fast.

  Args:
    case: the large case.
    scale: how it becomes one of this machine.
    num_rounds: rounds of steps.

  Raises:
    ValueError: if the small case's step graph is another one.
  """
  layout = case.layout()
  graph = case.graph(layout)
  with scaled_trainer(case, scale) as trainer:
    measure_kernels(trainer, num_passes=_PASSES)  # records warm up
    alone = _Alone.measure(trainer)
    there_s = lane_seconds(graph, case.price(layout, graph))["host"]
    slowness = sum(alone.kernels.tasks.values()) / there_s
    slowed = dataclasses.replace(case, profile=case.profile.slowed(slowness))
    costs = slowed.price(layout, graph)
    rounds = []
    for _ in range(num_rounds):
      trainer.set_costs(costs)
      measured_s, timeline = measure_step(trainer), trainer.timeline()
      before, alone = alone, _Alone.measure(trainer)
      rounds.append(
        _round(graph, costs, before.mean(alone), measured_s, timeline)
      )
  last = max(span.step for span in timeline.spans)
  simulation = _simulate(graph, costs, alone.in_runtime)
  lanes_s = lane_seconds(graph, _costs_of(simulation, costs, alone.kernels))
  return Run(
    slowness=slowness,
    bound_by=max(lanes_s, key=lambda lane: lanes_s[lane]),
    lanes_s=lanes_s,
    rounds=tuple(rounds),
    timeline=timeline.cycle(last - 1, last - 1),
    predicted_timeline=simulation.steady(),
  )


def measure_step(trainer: PacedTrainer) -> float:
  """Takes the steps of a round, of which the first ones do not count.

  Returns:
    The median time from one Validate to the next, in seconds.
  """
  for _ in range(_WARM_UP_STEPS + _STEPS + 1):
    trainer.step()
  trainer.drain()
  # The very last step has no successor that would share the lanes with it.
  steps_s = _steps_s(trainer.graph, trainer.timeline())[-_STEPS - 1 : -1]
  return statistics.median(steps_s)


def _round(
  graph: StepGraph,
  costs: Sequence[Cost],
  alone: _Alone,
  measured_s: float,
  timeline: Timeline,
) -> Round:
  # The very last step has no successor that would share the lanes with it.
  last = max(span.step for span in timeline.spans) - 1
  newest = timeline.cycle(last - _STEPS + 1, last)
  simulation = _simulate(graph, costs, alone.in_runtime)
  steady = simulation.steady()
  kernels = _costs_of(simulation, costs, alone.kernels)
  return Round(
    measured_s=measured_s,
    predicted_s=simulation.step_s,
    by_kernels_s=_simulate(graph, costs, alone.kernels).step_s,
    lower_bound_s=lower_bound_s(graph, kernels, {}),
    device_idle=newest.idle_s("device") / newest.window_s(),
    predicted_device_idle=steady.idle_s("device") / steady.window_s(),
    kernels_s=sum(alone.kernels.tasks.values()),
    in_runtime_s=sum(alone.in_runtime.tasks.values()),
  )


def _simulate(
  graph: StepGraph, costs: Sequence[Cost], host: HostSeconds
) -> Simulation:
  """Simulates with host tasks as measured; nothing is shared."""
  late = {index: Cost(seconds) for index, seconds in host.late.items()}
  simulation, _ = simulate_late(graph, _with(costs, host.tasks), late)
  return simulation


def _costs_of(
  simulation: Simulation, costs: Sequence[Cost], host: HostSeconds
) -> list[Cost]:
  """Returns what tasks cost in a step that was simulated."""
  late = simulation.late[simulation.last]
  return _with(_with(costs, host.tasks), {i: host.late[i] for i in late})


def _with(costs: Sequence[Cost], seconds: Mapping[int, float]) -> list[Cost]:
  return [
    Cost(seconds.get(index, cost.seconds)) for index, cost in enumerate(costs)
  ]


def lower_bound_s(
  graph: StepGraph,
  costs: Sequence[Cost],
  capacities: Mapping[Resource, float],
) -> float:
  """Returns what the busiest lane, or memory, takes for a step's tasks."""
  bounds = [*lane_seconds(graph, costs).values()]
  for resource, capacity in capacities.items():
    used = sum(cost.uses.get(resource, 0.0) for cost in costs)
    bounds.append(used / capacity)
  return max(bounds)


def lane_seconds(graph: StepGraph, costs: Sequence[Cost]) -> dict[str, float]:
  """Returns what the tasks of each lane take in a step, one after another."""
  seconds = dict.fromkeys((str(task.lane) for task in graph.tasks), 0.0)
  for task, cost in zip(graph.tasks, costs, strict=True):
    seconds[str(task.lane)] += cost.seconds
  return seconds


def scaled_trainer(case: Case, scale: Scale) -> PacedTrainer:
  """Returns what takes steps of a case at a scale; its costs are to be set.

  Raises:
    ValueError: if the small case's step graph is another one.
  """
  small = scale.small(case)
  layout = small.layout()
  graph = small.graph(layout)
  if _shape(graph) != _shape(case.graph(case.layout())):
    raise ValueError(
      f"divisor={scale.divisor} changes how the model is cut into buckets;"
      " use one that divides rows and buckets alike"
    )
  costs = [Cost(0.0)] * len(graph.tasks)
  return PacedTrainer(layout, small.plan, small.config, graph, costs)


def _shape(graph: StepGraph) -> list[Any]:
  return [dataclasses.replace(task, bytes=0) for task in graph.tasks]


def _steps_s(graph: StepGraph, timeline: Timeline) -> list[float]:
  """Returns the times from each Validate to the next one."""
  (validate,) = (
    task.index for task in graph.tasks if task.kind is TaskKind.VALIDATE
  )
  ends_s = [span.end_s for span in timeline.spans if span.task == validate]
  return [after - end for end, after in zip(ends_s, ends_s[1:], strict=False)]
