"""The planner. Oracle: every plan of a small space, simulated one by one."""

import dataclasses
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from sojax.graph.graph import TaskKind
from sojax.plan.plan import MIB, Plan
from sojax.planner.evaluate import Evaluator
from sojax.planner.explain import contributions, differences, explain
from sojax.planner.moves import neighbours, seeds
from sojax.planner.search import DoesNotFit, fits, search
from tests.planning import problem, profile, slow_link

SLOW_HOST = {
  name: curve.scaled(0.1) for name, curve in profile().host_rates.items()
}
MACHINES = {
  "gh200": profile(),
  "slow link": profile(**slow_link(2e10)),
  "slow host": profile(host_rates=SLOW_HOST),
  "slow device": profile(device_flops={"bfloat16": 5e13}),
  "small device": profile(device_bytes=16 * 10**8),
  "small host": profile(host_bytes=55 * 10**8),
}

SPACE = {
  "weights": ("stationary", "flow"),
  "activations": ("keep", "recompute", "offload"),
  "device_buckets": (0, 1, 2, 4),
  "speculation": ("wait", "record2"),
  "master": ("fp32", "split"),
  "weight_cast": ("host", "device"),
}
FIXED = {
  "bucket_bytes": 64 * MIB,
  "grad_cast": "host",
  "grad_window": 2,
  "park": "host",
  "flow_window": 2,
  "max_record_bytes": None,
  "escape_bytes_per_param": 0.5,
}


def every_plan(of):
  """Yields all of a problem's plans that differ in SPACE and fit."""
  evaluate = Evaluator(of)
  for values in itertools.product(*SPACE.values()):
    try:
      plan = of.plan(dict(zip(SPACE, values, strict=True)))
    except ValueError:
      continue
    candidate = evaluate(plan)
    if candidate.fits:
      yield candidate


@pytest.mark.parametrize("machine", MACHINES)
def test_the_best_plan_is_as_good_as_any_of_a_whole_space(machine):
  of = problem(machine=MACHINES[machine], forced=FIXED)
  best = search(of).best
  shortest_s = min(candidate.step_s for candidate in every_plan(of))
  assert best.step_s <= 1.02 * shortest_s
  assert best.fits


def test_machines_of_other_bottlenecks_get_other_plans():
  plans = {
    name: search(problem(machine=machine, forced=FIXED)).best.plan
    for name, machine in MACHINES.items()
  }
  assert len({*plans.values()}) >= 4
  assert plans["small device"].weights == "flow"


def test_no_neighbour_of_the_best_plan_is_better():
  of = problem()
  best = search(of).best
  evaluate = Evaluator(of)
  for fine in (False, True):
    for plan in neighbours(of, best.plan, fine=fine):
      try:
        candidate = evaluate(plan)
      except ValueError:
        continue
      assert not candidate.fits or candidate.step_s >= 0.99 * best.step_s


def test_the_same_problem_gets_the_same_plan():
  first, second = (search(problem()) for _ in range(2))
  assert first.best.plan == second.best.plan
  assert [c.plan for c in first.others] == [c.plan for c in second.others]


FORCED = {
  "weights": ("stationary", "flow"),
  "speculation": ("wait", "record2", "record3", "pingpong"),
  "device_buckets": (0, 3),
  "host_ratio": (0, 0.9, 1),
  "activations": ("keep", "recompute", "offload"),
  "grad_cast": ("host", "device", "host_separate"),
  "weight_cast": ("host", "device"),
  "master": ("fp32", "split"),
  "bucket_bytes": (32 * MIB, 100 * MIB),
  "accumulate": ("host", "device"),
  "park": ("host", "device"),
}


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=25)
def test_switches_that_are_given_are_obeyed_or_refused(data):
  names = data.draw(st.sets(st.sampled_from([*FORCED]), max_size=3))
  forced = {name: data.draw(st.sampled_from(FORCED[name])) for name in names}
  of = problem(forced=forced, num_stages=3, accumulation=2)
  try:
    Plan(**forced)
  except ValueError as error:
    with pytest.raises(ValueError) as caught:
      search(of)
    assert str(caught.value) == str(error)
    return
  ranking = search(of)
  for candidate in (ranking.best, *ranking.others):
    for name, value in forced.items():
      assert getattr(candidate.plan, name) == value


@pytest.mark.parametrize(
  "forced",
  [{"host_ratio": 0.5, "park": "device"}, {"device_buckets": 8}],
  ids=str,
)
def test_what_goes_with_no_seed_is_obeyed(forced):
  """The first ones flow or speculate, and have fewer, larger buckets."""
  best = search(problem(forced=forced)).best
  assert differences(Plan(), best.plan).items() >= forced.items()
  buckets = best.layout.buckets
  on_device = sum(bucket.on_device for bucket in buckets)
  assert on_device == forced.get("device_buckets", len(buckets) // 2)
  assert fits(problem(forced=forced))


def test_what_no_plan_can_do_is_refused_before_the_search():
  with pytest.raises(ValueError, match="device_buckets=1000 exceeds the"):
    search(problem(forced={"device_buckets": 1000}))
  with pytest.raises(ValueError, match="unknown plan switch 'wieghts'"):
    search(problem(forced={"wieghts": "flow"}))


@pytest.mark.parametrize("figures", [(10**9, 10**11), (10**12, 10**8)])
def test_a_model_that_does_not_fit_says_which_memory_is_short(figures):
  sizes = dict(zip(("host_bytes", "device_bytes"), figures, strict=True))
  forced = {"device_buckets": 0}
  of = problem(machine=profile(**sizes), forced=forced)
  assert not fits(of)
  with pytest.raises(DoesNotFit) as found:
    search(of)
  nearest = found.value.nearest
  short = "host" if figures[0] < figures[1] else "device"
  assert [s.space for s in nearest.shortages] == [short]
  (shortage,) = nearest.shortages
  assert shortage.needed_bytes == sum(nearest.memory()[short].values())
  assert shortage.available_bytes == int(0.95 * sizes[f"{short}_bytes"])
  assert f"short of {short} memory: " in str(found.value)


@pytest.mark.parametrize("name", ["host_bytes", "device_bytes"])
def test_a_plan_fits_to_the_byte(name):
  of = problem()
  plan = Plan(weights="flow", grad_window=2)
  space = name.removesuffix("_bytes")
  needed = sum(Evaluator(of)(plan).memory()[space].values())
  for spare, expected in ((0, True), (-1, False)):
    # The least that has `needed + spare` bytes after the reserve.
    total = next(
      n
      for n in range(int((needed + spare) / 0.95) - 2, 10**12)
      if int(0.95 * n) >= needed + spare
    )
    tight = dataclasses.replace(of, profile=profile(**{name: total}))
    assert int(0.95 * total) == needed + spare
    assert Evaluator(tight)(plan).fits is expected


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=30)
def test_a_larger_model_takes_no_less_memory(data):
  """By every plan that the planner tries: so bisection finds the largest."""
  accumulation = data.draw(st.sampled_from([1, 2]))
  small = problem(num_stages=4, accumulation=accumulation)
  larger = problem(num_stages=5, accumulation=accumulation)
  wider = problem(num_stages=4, accumulation=accumulation, num_columns=2**14)
  plans = [*seeds(small)]
  plans += neighbours(small, data.draw(st.sampled_from(plans)))
  plan = data.draw(st.sampled_from(plans))
  others = [wider] if isinstance(plan.weights, tuple) else [larger, wider]
  memory, *more = (Evaluator(of)(plan).memory() for of in (small, *others))
  for other in more:
    for space in ("host", "device"):
      assert sum(other[space].values()) >= sum(memory[space].values())


def test_a_slow_host_is_named_as_what_limits_the_step():
  """And the host work that nothing hides is in the tables beforehand."""
  on_host = {"device_buckets": 0}
  ranking = search(problem(machine=MACHINES["slow host"], forced=on_host))
  assert ranking.best.limit == "host"
  text = explain(ranking)
  assert "limited by: host" in text
  assert "exposed host time" in text
  best = ranking.best
  tasks = [*zip(best.graph.tasks, best._costs, strict=True)]
  backward_s, host_s = (
    sum(cost.seconds for task, cost in tasks if task.kind is kind)
    for kind in (TaskKind.BACKWARD, TaskKind.HOST_UPDATE)
  )
  assert host_s > 2 * backward_s
  assert "the host is slower than backward: its work on gradients" in text
  assert f"backward {backward_s:.4f} s; while" in text
  waits_s = float(text.split("the device waits for ")[1].split(" s")[0])
  # What backward and forward cannot hide, and no more than all of it.
  device_s = best.simulation.steady().busy_s("device")
  assert host_s - device_s - 1e-4 <= waits_s <= host_s
  slow_device = search(problem(machine=MACHINES["slow device"], tokens=8192))
  assert slow_device.best.limit == "device"
  assert "the host is slower" not in explain(slow_device)


def test_contributions_are_steps_without_one_technique():
  of = problem(forced={"device_buckets": 0})
  ranking = search(of)
  best = ranking.best
  found = {item.name: item for item in contributions(best)}
  assert found["speculation"].value == best.plan.speculation != "wait"
  for item in found.values():
    if item.without is not None:
      changed = differences(best.plan, item.without.plan)
      assert [*changed] == [item.name]
  without = found["speculation"].without
  assert without.fits and without.step_s > best.step_s
  text = explain(ranking)
  gain = 100 * (without.step_s / best.step_s - 1)
  assert f"{without.step_s:.4f} s, {gain:+.1f} %" in text


def test_the_explanation_has_every_byte_of_the_account():
  ranking = search(problem())
  text = explain(ranking)
  for space, part in ranking.best.memory().items():
    assert f"{space} in all {sum(part.values()) / 2**30:.2f} GiB" in text
    for name, size in part.items():
      assert (f"\n{space} {name} " in text) == (size > 0), name


def test_a_residency_of_each_stage_is_written_in_runs():
  weights = ("stationary",) * 2 + ("flow",) * 4
  ranking = search(problem(forced={"weights": weights, "device_buckets": 0}))
  assert ranking.best.plan.weights == weights
  assert "weights=(2 x stationary, 4 x flow)" in explain(ranking)


def test_some_stages_flow_where_not_all_weights_fit():
  """Between all flowing and all staying there is a better one."""
  of = problem(
    machine=profile(device_bytes=15 * 10**8, **slow_link(2e10)),
    forced={"device_buckets": 0, "activations": "recompute"},
  )
  found = search(of).best.plan.weights
  assert isinstance(found, tuple) and len({*found}) == 2


def test_buckets_that_run_ahead_do_so_in_the_graph():
  best = search(problem(forced={"speculation": "record2"})).best
  settled = [t for t in best.graph.tasks if t.kind is TaskKind.HOST_SETTLE]
  assert settled
