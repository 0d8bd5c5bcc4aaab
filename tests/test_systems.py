"""Systems to compare: their graphs by hand, and what is predicted of them."""

import dataclasses
import math

import pytest

from experiments.paper import systems
from experiments.paper.constants import PREDICTION
from experiments.paper.predict import fits, fitting_plan, machine_of, predict
from experiments.paper.systems import InGroups, System, weights_at_the_end
from sojax.graph.schedule import schedule
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Costs
from sojax.plan.plan import Plan
from sojax.planner.problem import Problem
from tests.test_costs import ELEMS, MACHINE, workload

CONFIG = TrainConfig(micro_batch=1, seq_len=8, precision="bf16")
AHEAD = Plan(speculation="record3", speculate="always")


def graph_of(plan):
  work = workload()
  layout = work.layout(plan, CONFIG)
  return schedule(layout, plan, CONFIG, work.input_bytes), layout


def names(graph, dep="deps"):
  """Returns the names of what each task waits for, by its name."""
  return {
    task.name: {graph.tasks[i].name for i in getattr(task, dep)}
    for task in graph.tasks
  }


def of(kind, buckets):
  micro = " micro=0" if kind == "grad_out" else ""
  return {f"{kind} stage={2 - b} bucket={b}{micro}" for b in buckets}


def test_weights_at_the_end_wait_for_all_updates():
  graph, layout = graph_of(Plan())
  changed = weights_at_the_end(graph, layout)
  for bucket in (0, 1, 2):
    (name,) = of("weight_in", [bucket])
    assert names(changed)[name] == of("host_update", (0, 1, 2))
  # Nothing else is changed, nor what the next step waits for.
  assert {
    name: deps for name, deps in names(changed).items() if "weight" not in name
  } == {
    name: deps for name, deps in names(graph).items() if "weight" not in name
  }
  assert names(changed, "prev_deps") == names(graph, "prev_deps")


@pytest.mark.parametrize("plan", [Plan(), AHEAD])
def test_a_group_begins_with_its_last_gradient_and_ends_as_one(plan):
  graph, layout = graph_of(plan)
  before, after = names(graph), names(InGroups(2.5 * ELEMS)(graph, layout))
  groups = {0: (0, 1), 1: (0, 1), 2: (2,)}
  for bucket, group in groups.items():
    (update,), (sent,) = of("host_update", [bucket]), of("weight_in", [bucket])
    assert after[update] == before[update] | of("grad_out", group)
    assert after[sent] == of("host_update", group)
  assert after.keys() == before.keys()


def test_weights_that_flow_are_fetched_as_before_whatever_is_grouped():
  plan = Plan(weights="flow")
  graph, layout = graph_of(plan)
  changed = weights_at_the_end(InGroups(1e9)(graph, layout), layout)
  for name, deps in names(changed).items():
    if name.startswith("weight_in"):
      assert deps == names(graph)[name]


def test_a_device_bucket_is_in_no_group():
  graph, layout = graph_of(Plan(device_buckets=1))
  changed = names(InGroups(1e9)(graph, layout))
  (update,) = of("host_update", [1])
  assert of("grad_out", (0, 1)) <= changed[update]
  assert not of("grad_out", [2]) & changed[update]


def machine(**changes):
  return dataclasses.replace(MACHINE, dispatch_s=0.0, **changes)


def test_a_step_that_waits_takes_what_is_added_up_by_hand():
  system = System(
    name="waiting",
    plans=(Plan(),),
    transforms=(weights_at_the_end,),
    step_s_per_param=1e-6,
  )
  found = predict(system, workload(), CONFIG, machine())
  assert found is not None
  costs = Costs(
    workload().layout(Plan(), CONFIG), Plan(), CONFIG, workload(), machine()
  )
  device_s = sum(costs.forward(stage).seconds for stage in (0, 1))
  device_s += sum(costs.backward(stage, True).seconds for stage in (1, 2))
  # All of forward is computed again: 1e9 bytes more of stage 0, FLOPs of 1.
  device_s += (3e12 - 2.5e12) / 5e11
  device_s += costs.backward(0, True).seconds
  last_grad_s = costs.grad_out(2).seconds
  # The updates begin with the gradients that arrive last, of stage 0.
  updates_s = 3 * ELEMS * 1e-6
  # The first forward waits for the weights of stage 0, which leave first; all
  # others have arrived before it has ended.
  first_weights_s = costs.weight_in(2).seconds
  # Gradients of bucket 1, and weights of 1 and 0, cross beside programs that
  # would take all of the device's memory bandwidth.
  shared_s = 3 * 2 * ELEMS / 1e11
  assert found.step_s == pytest.approx(
    device_s + last_grad_s + updates_s + first_weights_s + shared_s, rel=1e-9
  )


def test_seconds_of_a_systems_adam_are_its_own_whatever_it_moves():
  plan = Plan(grad_cast="device", weight_cast="device")
  system = System(name="x", plans=(plan,), step_s_per_param=3e-9)
  own = machine_of(system, plan, CONFIG, MACHINE)
  layout = workload().layout(plan, CONFIG)
  costs = Costs(layout, plan, CONFIG, workload(), own)
  assert costs.host_update(0, ahead=False).seconds == pytest.approx(
    3e-9 * ELEMS
  )


def test_free_records_take_neither_time_nor_memory():
  system = System(name="x", plans=(AHEAD,), free_records=True)
  own = machine_of(system, AHEAD, CONFIG, MACHINE)
  layout = workload().layout(AHEAD, CONFIG)
  costs = Costs(layout, AHEAD, CONFIG, workload(), own)
  ahead = costs.host_update(0, ahead=True)
  assert ahead.seconds == pytest.approx(
    costs.host_update(0, ahead=False).seconds
  )
  small = machine(host_bytes=exact_bytes(dict(speculation="wait"), "host"))
  paying = dataclasses.replace(system, free_records=False)
  assert fits(system, AHEAD, workload(), CONFIG, small)
  assert not fits(paying, AHEAD, workload(), CONFIG, small)


def exact_bytes(switches, space):
  """Returns the memory that a plan just fits in."""
  plan = Plan(**switches)
  problem = Problem(workload=workload(), config=CONFIG, profile=machine())
  account = problem.account(workload().layout(plan, CONFIG), plan)
  used = sum(problem.memory(account)[space].values())
  share = problem.available_bytes[space] / getattr(MACHINE, f"{space}_bytes")
  return math.ceil(used / share) + 1


def test_the_first_plan_that_fits_is_taken_and_its_fastest_share():
  many = {"bucket_bytes": 1 << 20}
  flowing, stationary = Plan(weights="flow", **many), Plan(**many)
  system = System(
    name="x", plans=(flowing, stationary), device_shares=(0.0, 0.5)
  )

  def predicted(system, **changes):
    found = predict(system, workload(), CONFIG, machine(**changes))
    return None if found is None else found.plan

  assert predicted(system) == flowing
  system = dataclasses.replace(system, plans=(stationary,))
  assert predicted(system) == Plan(device_buckets=3, **many)
  assert fitting_plan(system, workload(), CONFIG, machine()) == stationary
  # The state of device buckets, 12 bytes of half of the parameters.
  small = exact_bytes(many, "device")
  assert predicted(system, device_bytes=small) == stationary
  for changes in ({"device_bytes": 1}, {"host_bytes": 1}):
    assert predicted(system, **changes) is None
    assert fitting_plan(system, workload(), CONFIG, machine(**changes)) is None


def test_each_row_of_the_ablation_changes_one_thing():
  rows = systems.ablation(PREDICTION)
  fields = [field.name for field in dataclasses.fields(System)]
  changed = [
    {
      name
      for name in fields
      if getattr(before, name) != getattr(after, name) and name != "name"
    }
    for before, after in zip(rows, rows[1:], strict=False)
  ]
  assert changed == [
    {"step_s_per_param"},
    {"plans"},
    {"plans", "transforms", "free_records"},
    {"device_shares"},
  ]
