"""What holds for every simulation, whatever the graph and the costs.

Three facts together leave a simulation no freedom: threads issue as the
executor does, a task starts as soon as it may, and speeds are max-min fair at
all times. Each is checked on its own; without contention a slow simulator gives
the same times.
"""

import dataclasses
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from sojax.graph import simulate as simulate_lib
from sojax.graph.graph import Lane, StepGraph
from sojax.graph.sharing import Sharing, max_min_speeds
from sojax.graph.simulate import simulate
from sojax.plan.costs import Cost
from sojax.plan.hardware import Resource
from tests.simulating import (
  SlowSimulator,
  has_fixed_lane_order,
  issuers_of,
  random_graphs,
  scheduled,
)

_SETTINGS = hypothesis.settings(deadline=None, max_examples=50)
_STEPS = 7

graphs = st.one_of(random_graphs(), scheduled().map(lambda made: made.graph))
dispatches = st.sampled_from([0.0, 1.0, 3.0])


@st.composite
def seconds_of(draw, graph, at_least):
  """Small integers, so that sums are exact and ties are common."""
  source = draw(st.randoms(use_true_random=False))
  return [float(source.randint(at_least, 9)) for _ in graph.tasks]


@st.composite
def costs_of(draw, graph):
  """Costs that use two memories, if they take time."""
  source = draw(st.randoms(use_true_random=False))
  costs = []
  for _ in graph.tasks:
    seconds = float(source.randint(0, 9))
    uses = {memory: float(source.randint(0, 40)) for memory in CAPACITIES}
    costs.append(Cost(seconds, uses if seconds else {}))
  return costs


CAPACITIES = {Resource.HOST_MEMORY: 3.0, Resource.DEVICE_MEMORY: 5.0}


def simulate_all_steps(*args, **settings):
  """Simulates `max_steps`, whether they repeat or not."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(simulate_lib, "MAX_PERIOD", 0)
    return simulate(*args, **settings)


def by_task(found):
  """Starts and ends by step and task."""
  keys = [
    (step, task)
    for step in range(len(found.ends_s))
    for task in range(len(found.graph.tasks))
  ]
  return (
    {(n, t): found.starts_s[n][t] for n, t in keys},
    {(n, t): found.ends_s[n][t] for n, t in keys},
  )


@_SETTINGS
@hypothesis.given(st.data())
def test_it_agrees_with_a_slow_simulator(data):
  graph = data.draw(graphs)
  dispatch_s = data.draw(dispatches)
  seconds = data.draw(seconds_of(graph, 0))
  costs = [Cost(s) for s in seconds]
  found = simulate(graph, costs, dispatch_s=dispatch_s, max_steps=_STEPS)
  starts, ends = by_task(found)
  slow = SlowSimulator(graph, seconds, dispatch_s, _STEPS)
  expected_starts, expected_ends = slow.run()
  assert starts == {key: expected_starts[key] for key in starts}
  assert ends == {key: expected_ends[key] for key in ends}


@_SETTINGS
@hypothesis.given(st.data())
def test_tasks_start_as_soon_as_they_may_and_one_by_one(data):
  graph = data.draw(graphs)
  dispatch_s = data.draw(dispatches)
  costs = data.draw(costs_of(graph))
  found = simulate_all_steps(
    graph,
    costs,
    capacities=CAPACITIES,
    dispatch_s=dispatch_s,
    max_steps=_STEPS,
  )
  starts, ends = by_task(found)
  num_steps = len(found.ends_s)
  seconds = [cost.seconds for cost in costs]
  slow = SlowSimulator(graph, seconds, dispatch_s, num_steps)
  slow.end = ends
  issued = slow.issue_times()
  for lane in Lane:
    order = sorted(
      (starts[n, t.index], ends[n, t.index], issued[n, t.index], n, t.index)
      for n, t in slow.all
      if t.lane is lane
    )
    free = 0.0
    for start, end, at, n, t in order:
      task = graph.tasks[t]
      deps = [ends[n, dep] for dep in task.deps]
      deps += [ends[n - 1, dep] for dep in task.prev_deps if n]
      if not seconds[t]:
        assert start == end == max([at, *deps])
        continue
      assert start == max([free, at, *deps])
      assert end >= start + seconds[t] * (1 - 1e-12)
      free = end


class RecordingSharing(Sharing):
  """Writes down when which lane runs what, and how fast."""

  log: list

  def start(self, lane, task, now_s):
    super().start(lane, task, now_s)
    self.log.append((now_s, lane, task, 1.0))

  def _set_speed(self, lane, speed, now_s):
    super()._set_speed(lane, speed, now_s)
    self.log.append((now_s, lane, self.log_task(lane), speed))

  def log_task(self, lane):
    return next(task for _, of, task, _ in reversed(self.log) if of == lane)

  def take_ended(self, now_s):
    lanes = super().take_ended(now_s)
    self.log += [(now_s, lane, None, 0.0) for lane in lanes]
    return lanes


def rates_of(cost):
  return {r: amount / cost.seconds for r, amount in cost.uses.items() if amount}


def assert_fair(running, costs):
  """Checks capacities, and that whoever is slowed is among a memory's fastest.

  That memory is used up, and no user of it is faster: this is what max-min
  fairness means.
  """
  used = dict.fromkeys(CAPACITIES, 0.0)
  for task, speed in running:
    for resource, rate in rates_of(costs[task]).items():
      used[resource] += speed * rate
  for resource, capacity in CAPACITIES.items():
    assert used[resource] <= capacity * (1 + 1e-9)
  for task, speed in running:
    assert 0 < speed <= 1
    assert speed == 1 or any(
      used[resource] >= CAPACITIES[resource] * (1 - 1e-9)
      and all(
        other <= speed * (1 + 1e-9)
        for rival, other in running
        if resource in rates_of(costs[rival])
      )
      for resource in rates_of(costs[task])
    )


@_SETTINGS
@hypothesis.given(st.data())
def test_at_all_times_speeds_are_fair_and_what_is_used_is_conserved(data):
  graph = data.draw(graphs)
  costs = data.draw(costs_of(graph))
  RecordingSharing.log = log = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(simulate_lib, "Sharing", RecordingSharing)
    simulate(graph, costs, capacities=CAPACITIES, max_steps=_STEPS)
  running, done_s, before_s = {}, {}, 0.0
  for now_s, events in itertools.groupby(log, key=lambda event: event[0]):
    assert now_s >= before_s
    if now_s > before_s:
      assert_fair(running.values(), costs)
    for lane, (_, speed) in running.items():
      done_s[lane] += speed * (now_s - before_s)
    for _, lane, task, speed in events:
      if task is None:
        ended, _ = running.pop(lane)
        # Of an amount, rate times this; so amounts are conserved as well.
        assert done_s[lane] == pytest.approx(costs[ended].seconds, rel=1e-9)
        continue
      if lane not in running:
        done_s[lane] = 0.0
      running[lane] = task, speed
    before_s = now_s


@_SETTINGS
@hypothesis.given(st.data())
def test_no_step_is_faster_than_its_bounds(data):
  graph = data.draw(graphs)
  costs = data.draw(costs_of(graph))
  found = simulate(
    graph,
    costs,
    capacities=CAPACITIES,
    dispatch_s=data.draw(dispatches),
    max_steps=_STEPS,
  )
  num_steps = len(found.ends_s)
  makespan_s = max(max(ends) for ends in found.ends_s)
  longest_s = {}
  for n in range(num_steps):
    for task in graph.tasks:
      before = [longest_s[n, dep] for dep in task.deps]
      before += [longest_s[n - 1, dep] for dep in task.prev_deps if n]
      longest_s[n, task.index] = costs[task.index].seconds + max(
        before, default=0.0
      )
  bounds = [max(longest_s.values())]
  for lane in Lane:
    busy_s = [costs[t.index].seconds for t in graph.tasks if t.lane is lane]
    bounds.append(num_steps * sum(busy_s))
  for resource, capacity in CAPACITIES.items():
    amount = sum(cost.uses.get(resource, 0.0) for cost in costs)
    bounds.append(num_steps * amount / capacity)
  assert makespan_s >= max(bounds) * (1 - 1e-9)


fixed_order = graphs.filter(has_fixed_lane_order)


def assert_not_later(ours, theirs):
  """Compares the ends of all tasks of the steps that both simulated."""
  for mine, yours in zip(ours.ends_s, theirs.ends_s, strict=False):
    assert all(a <= b for a, b in zip(mine, yours, strict=True))
  if ours.period and theirs.period:
    assert ours.step_s <= theirs.step_s * (1 + 1e-9)


@_SETTINGS
@hypothesis.given(st.data())
def test_removing_a_dependency_never_slows_a_step(data):
  graph = data.draw(fixed_order)
  edges = [
    (task.index, field, dep)
    for task in graph.tasks
    for field in ("deps", "prev_deps")
    for dep in getattr(task, field)
  ]
  hypothesis.assume(edges)
  index, field, dep = data.draw(st.sampled_from(edges))
  tasks = list(graph.tasks)
  left = tuple(d for d in getattr(tasks[index], field) if d != dep)
  tasks[index] = dataclasses.replace(tasks[index], **{field: left})
  relaxed = StepGraph(tuple(tasks))
  hypothesis.assume(issuers_of(relaxed) == issuers_of(graph))
  costs = [Cost(s) for s in data.draw(seconds_of(graph, 0))]
  dispatch_s = data.draw(dispatches)
  assert_not_later(
    simulate(relaxed, costs, dispatch_s=dispatch_s, max_steps=_STEPS),
    simulate(graph, costs, dispatch_s=dispatch_s, max_steps=_STEPS),
  )


@_SETTINGS
@hypothesis.given(st.data())
def test_a_faster_lane_never_slows_a_step(data):
  graph = data.draw(fixed_order)
  lane = data.draw(st.sampled_from([*Lane]))
  seconds = data.draw(seconds_of(graph, 0))
  factor = data.draw(st.sampled_from([0.0, 0.5, 0.75]))
  faster = [
    Cost(s * factor if task.lane is lane else s)
    for task, s in zip(graph.tasks, seconds, strict=True)
  ]
  dispatch_s = data.draw(dispatches)
  assert_not_later(
    simulate(graph, faster, dispatch_s=dispatch_s, max_steps=_STEPS),
    simulate(
      graph,
      [Cost(s) for s in seconds],
      dispatch_s=dispatch_s,
      max_steps=_STEPS,
    ),
  )


@hypothesis.settings(_SETTINGS, max_examples=30)
@hypothesis.given(st.data())
def test_a_steady_state_goes_on(data):
  """Simulated for longer, the steps take what the first ones said."""
  graph = data.draw(graphs)
  costs = data.draw(costs_of(graph))
  settings = {"capacities": CAPACITIES, "dispatch_s": data.draw(dispatches)}
  found = simulate(graph, costs, **settings)
  hypothesis.assume(found.period is not None)
  longer = simulate_all_steps(graph, costs, max_steps=100, **settings)
  ends = [max(times) for times in longer.ends_s]
  # 12 steps are whole periods of 1, 2, 3 and 4. Of the last 40 steps threads
  # and lanes may have got ahead, and leave more of a memory to the others.
  mean_s = (ends[59] - ends[47]) / 12
  assert mean_s == pytest.approx(found.step_s, rel=1e-6)


memories = st.sampled_from([*CAPACITIES])


@_SETTINGS
@hypothesis.given(
  st.lists(st.dictionaries(memories, st.integers(1, 20).map(float)), max_size=5)
)
def test_speeds_are_max_min_fair(uses):
  costs = [Cost(1.0, of_task) for of_task in uses]
  rates = [tuple(of_task.items()) for of_task in uses]
  speeds = max_min_speeds(rates, CAPACITIES)
  assert_fair([*enumerate(speeds)], costs)
