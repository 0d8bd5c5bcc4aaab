"""Paced cases: their scale, their bounds by hand, and a run of a tiny model."""

import dataclasses
import time

import numpy as np
import pytest

import sojax
from experiments.host_times import (
  HostSeconds,
  host_spans,
  measure_in_runtime,
  measure_kernels,
)
from experiments.scaled import (
  Case,
  Scale,
  lane_seconds,
  lower_bound_s,
  run_paced,
)
from sojax import models
from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.graph.timeline import Span, Timeline
from sojax.plan.adamw import adam_scalars
from sojax.plan.costs import Cost
from sojax.plan.hardware import Resource
from sojax.plan.machines import machine
from sojax.plan.plan import Plan
from sojax.programs.workload import gpt_workload
from sojax.reference.adamw import adamw_float32
from sojax.runtime.speculation import Speculation
from sojax.runtime.updates import HostUpdates
from tests.test_paced import PLANS, paced, state_of

TINY = models.GPTConfig(
  vocab_size=256, num_layers=2, hidden_dim=128, num_heads=2, max_seq_len=64
)
AHEAD = Plan(bucket_bytes=1 << 18, speculation="record3", speculate="always")


def case(plan=AHEAD):
  config = sojax.TrainConfig(micro_batch=2, seq_len=64, precision="bf16")
  return Case(
    workload=gpt_workload(TINY, config, sojax.adamw(1e-3)),
    config=config,
    plan=plan,
    profile=machine("gh200"),
  )


def test_a_lane_or_a_memory_bounds_the_step():
  tasks = [
    Task(index=0, kind=TaskKind.FORWARD, lane=Lane.DEVICE),
    Task(index=1, kind=TaskKind.BACKWARD, lane=Lane.DEVICE, deps=(0,)),
    Task(index=2, kind=TaskKind.GRAD_OUT, lane=Lane.D2H, deps=(1,)),
  ]
  graph = StepGraph(tuple(tasks))
  memory = Resource.HOST_MEMORY
  costs = [Cost(1.0), Cost(2.0, {memory: 30.0}), Cost(2.5, {memory: 50.0})]
  assert lane_seconds(graph, costs) == {"device": 3.0, "d2h": 2.5}
  assert lower_bound_s(graph, costs, {}) == 3.0
  assert lower_bound_s(graph, costs, {memory: 20.0}) == 4.0


def test_a_small_case_has_the_same_tasks_and_a_fraction_of_the_parameters():
  large, scale = case(), Scale(divisor=4, pool_threads=1)
  small = scale.small(large)
  graphs = [x.graph(x.layout()).tasks for x in (large, small)]
  assert [t.name for t in graphs[0]] == [t.name for t in graphs[1]]
  assert [t.deps for t in graphs[0]] == [t.deps for t in graphs[1]]
  elems = [
    sum(bucket.size for bucket in x.layout().buckets) for x in (large, small)
  ]
  assert elems[0] == 4 * elems[1]


def test_a_divisor_that_cuts_buckets_otherwise_is_refused():
  with pytest.raises(ValueError, match="divisor=3 changes how the model"):
    run_paced(case(), Scale(divisor=3, pool_threads=1), num_rounds=1)


@pytest.mark.parametrize("device_buckets", [0, 3])
def test_paced_steps_are_no_shorter_than_the_device_takes(device_buckets):
  plan = dataclasses.replace(AHEAD, device_buckets=device_buckets)
  run = run_paced(case(plan), Scale(divisor=2, pool_threads=1), num_rounds=2)
  row = run.row()
  assert run.slowness > 0 and len(run.rounds) == 2
  assert row["measured_s"] >= 0.999 * run.lanes_s["device"]
  assert row["predicted_s"] >= 0.999 * run.lanes_s["device"]
  assert row["lower_bound_s"] >= 0.999 * run.lanes_s["device"]
  assert 0 <= row["device_idle"] < 1
  ratios = [x.measured_s / x.predicted_s for x in run.rounds]
  assert row["measured_over_predicted"] == pytest.approx(np.mean(ratios))
  # Before each of the two rounds of eight steps ten are measured.
  assert max(span.step for span in run.timeline.spans) >= 34


@pytest.mark.parametrize("name", ["wait", "record3", "pingpong", "host_sums"])
def test_host_tasks_alone_take_the_steps_that_they_time(name):
  accumulation = 1
  with paced(PLANS[name], accumulation=accumulation) as ours:
    before = {index: state_of(x) for index, x in ours.host_buckets.items()}
    seconds = measure_kernels(ours, num_passes=3)
    for of_tasks in (seconds.tasks, seconds.late):
      assert all(value > 0 for value in of_tasks.values())
    tasks = ours.graph.tasks
    assert set(seconds.tasks) == {
      task.index for task in tasks if task.lane is Lane.HOST
    }
    ahead = "speculation" in PLANS[name]
    assert set(seconds.late) == {
      t.index for t in tasks if ahead and t.kind is TaskKind.HOST_UPDATE
    }
    if name == "record3":  # of the steps that leave records, taken first
      hosts = ours.host_buckets.values()
      assert all(host._record.codes.any() for host in hosts), "took plain steps"
    for index, state in before.items():
      bucket = ours.host_buckets[index].bucket
      grad = np.concatenate([x for xs in ours.gradients[index] for x in xs])
      scalars = adam_scalars(ours.layout.model.groups[bucket.group], 0)
      for _ in range(6 if ahead else 3):
        state = adamw_float32(*state, grad, scalars)
      for a, b in zip(state_of(ours.host_buckets[index]), state, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_a_host_task_takes_from_when_it_could_begin_to_its_end():
  tasks = [
    Task(index=0, kind=TaskKind.HOST_SCALARS, lane=Lane.HOST),
    Task(index=1, kind=TaskKind.GRAD_OUT, lane=Lane.D2H),
    Task(index=2, kind=TaskKind.HOST_UPDATE, lane=Lane.HOST, deps=(0, 1)),
    Task(index=3, kind=TaskKind.WEIGHT_IN, lane=Lane.H2D, deps=(2,)),
    Task(index=4, kind=TaskKind.HOST_UPDATE, lane=Lane.HOST, deps=(0, 1)),
  ]
  times = {
    (0, 0): (1.0, 1.25),
    (0, 1): (1.0, 2.0),
    (0, 2): (2.5, 4.0),
    (0, 3): (4.0, 4.25),
    (0, 4): (4.5, 7.0),
    (1, 0): (9.0, 9.5),
    (1, 1): (9.0, 9.25),
    (1, 2): (9.75, 10.0),
    (1, 4): (10.0, 11.0),
  }
  timeline = Timeline(
    Span(str(tasks[i].kind), str(tasks[i].lane), step, start, end, task=i)
    for (step, i), (start, end) in times.items()
  )
  steps = host_spans(StepGraph(tuple(tasks)), timeline)
  assert [{s.task: seconds for s, seconds in step} for step in steps] == [
    {0: 0.25, 2: 2.0, 4: 3.0},
    {0: 0.5, 2: 0.5, 4: 1.0},
  ]


@pytest.mark.parametrize("name", ["record3", "split"])
def test_updates_are_measured_in_the_runtime_both_ahead_and_late(
  name, monkeypatch
):
  speculate, slower_s = HostUpdates._speculate, 0.005

  def slower(*args):
    time.sleep(slower_s)
    speculate(*args)

  monkeypatch.setattr(HostUpdates, "_speculate", slower)
  with paced(PLANS[name]) as ours:
    kernels = measure_kernels(ours, num_passes=1)
    longer = {index: 2 * slower_s for index in kernels.tasks}
    seconds = measure_in_runtime(
      ours, HostSeconds(longer, kernels.late), num_steps=3
    )
  assert seconds.tasks.keys() == kernels.tasks.keys()
  assert seconds.late.keys() == kernels.late.keys() != set()
  assert all(seconds.tasks[index] >= slower_s for index in seconds.late)
  assert min(seconds.late.values()) < slower_s


@pytest.mark.parametrize("name", ["wait", "host_sums"])
def test_updates_that_are_never_late_are_measured_all_the_same(name):
  """Validate waits for sums on the host: updates begin as soon as it does."""
  with paced(PLANS[name], accumulation=3) as ours:
    kernels = measure_kernels(ours, num_passes=1)
    seconds = measure_in_runtime(ours, kernels, num_steps=2)
  assert seconds.tasks.keys() == kernels.tasks.keys()
  assert seconds.late.keys() == kernels.late.keys()


def test_updates_that_must_run_ahead_and_do_not_are_an_error(monkeypatch):
  monkeypatch.setattr(Speculation, "why_not", lambda *args: "waits: a test")
  with paced(PLANS["record3"]) as ours:
    kernels = measure_kernels(ours, num_passes=1)
    with pytest.raises(
      RuntimeError, match="of 11 tasks of the host only 6 ran"
    ):
      measure_in_runtime(ours, kernels, num_steps=1)


def test_in_the_runtime_new_weights_take_half_of_their_update(monkeypatch):
  with paced(PLANS["record3"]) as ours:
    kernels = measure_kernels(ours, num_passes=1)
    given, set_costs = [], ours.set_costs
    monkeypatch.setattr(
      ours, "set_costs", lambda costs: (given.append(costs), set_costs(costs))
    )
    measure_in_runtime(ours, kernels, num_steps=1)
  assert len(given) == 2
  for costs, held in zip(
    given, (TaskKind.VALIDATE, TaskKind.GRAD_OUT), strict=True
  ):
    first = next(t.index for t in ours.graph.tasks if t.kind is held)
    assert costs[first].seconds > 2 * sum(kernels.tasks.values())
    for task, cost in zip(ours.graph.tasks, costs, strict=True):
      if task.kind is TaskKind.WEIGHT_IN:
        (update,) = task.deps
        assert cost == Cost(kernels.tasks[update] / 2)
      elif task.index != first and task.kind is not TaskKind.WEIGHT_RESEND:
        assert cost == Cost(0.0), task.name
