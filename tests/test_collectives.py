"""Collectives in step graphs. Oracle: edges and times written out by hand."""

import hypothesis
import pytest
from hypothesis import strategies as st

from sojax.graph.collectives import with_collectives
from sojax.graph.graph import Lane, TaskKind
from sojax.graph.simulate import simulate
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Cost
from sojax.plan.network import CollectiveBytes, collective_bytes, network_bytes
from sojax.plan.plan import Plan
from tests.simulating import (
  has_fixed_lane_order,
  schedule_of,
  scheduled,
  workload_of,
)

CARRIED = CollectiveBytes(
  forward=(3, 5, 0), backward=(7, 0, 11), scatter=(13, 0, 17)
)


def made_of(**switches):
  accumulation = switches.pop("accumulation", 1)
  return schedule_of(
    workload_of(1),
    Plan(bucket_bytes=1 << 18, **switches),
    TrainConfig(micro_batch=1, seq_len=8, accumulation=accumulation),
  )


def edges_of(graph, field="deps"):
  """Names by name; a gather is named by the use that it is for."""
  names = {}
  for task in graph.tasks:
    name = task.name
    if task.kind is TaskKind.ALL_GATHER:
      use = next(t for t in graph.tasks if task.index in t.deps)
      name = f"gather for {use.name}"
    names[task.index] = name
  return {
    names[task.index]: [names[i] for i in getattr(task, field)]
    for task in graph.tasks
  }


F0, F1 = "forward stage=0 micro=0", "forward stage=1 micro=0"
B2, B1, B0 = (f"backward stage={stage} micro=0" for stage in (2, 1, 0))
S2, S0 = (f"reduce_scatter stage={stage} micro=0" for stage in (2, 0))
OUT2, OUT1 = (
  f"grad_out stage={stage} bucket={2 - stage} micro=0" for stage in (2, 1)
)
UPDATE0 = "device_update stage=0 bucket=2"


def test_collectives_that_are_part_of_programs_hold_up_all():
  plain = made_of(device_buckets=1).graph
  graph = with_collectives(plain, CARRIED, overlapped=False)
  expected = edges_of(plain) | {
    f"gather for {F0}": [],
    F0: [f"gather for {F0}"],
    f"gather for {F1}": [F0],
    F1: [F0, f"gather for {F1}"],
    f"gather for {B2}": [F1],
    B2: [F1, f"gather for {B2}"],
    S2: [B2],
    OUT2: [S2],
    B1: [B2, S2],
    OUT1: [B1],
    f"gather for {B0}": [B1],
    B0: [B1, f"gather for {B0}"],
    S0: [B0],
    "validate": [S2, B1, S0, "host_scalars"],
    UPDATE0: [S0, "validate"],
  }
  assert edges_of(graph) == expected
  carried = edges_of(plain, "prev_deps")
  expected = carried | {
    f"gather for {F0}": carried[F0],
    f"gather for {F1}": carried[F1],
    f"gather for {B2}": carried[B2],
    f"gather for {B0}": carried[B0],
    S2: [],
    S0: [],
  }
  assert edges_of(graph, "prev_deps") == expected


def test_collectives_beside_programs_wait_for_weights_and_one_use_ahead():
  plain = made_of(device_buckets=1).graph
  graph = with_collectives(plain, CARRIED, overlapped=True)
  expected = edges_of(plain) | {
    f"gather for {F0}": [],
    F0: [f"gather for {F0}"],
    f"gather for {F1}": [],
    F1: [F0, f"gather for {F1}"],
    f"gather for {B2}": [F0],
    B2: [F1, f"gather for {B2}"],
    S2: [B2],
    OUT2: [S2],
    B1: [B2],
    OUT1: [B1],
    f"gather for {B0}": [B2],
    B0: [B1, f"gather for {B0}"],
    S0: [B0],
    "validate": [S2, B1, S0, "host_scalars"],
    UPDATE0: [S0, "validate"],
  }
  assert edges_of(graph) == expected
  carried = edges_of(plain, "prev_deps")
  arrived = carried[F1]
  assert edges_of(graph, "prev_deps") == carried | {
    f"gather for {F0}": [UPDATE0, B1],
    f"gather for {F1}": [*arrived, B0],
    f"gather for {B2}": carried[B2],
    f"gather for {B0}": carried[B0],
    S2: [],
    S0: [],
  }


def test_collectives_carry_the_bytes_of_their_use():
  graph = with_collectives(made_of().graph, CARRIED, overlapped=True)
  moved = [t.bytes for t in graph.tasks if t.lane is Lane.NETWORK]
  assert moved == [3, 5, 11, 17, 7, 13]


def test_weights_that_flow_in_are_gathered_when_they_have_arrived():
  graph = with_collectives(
    made_of(weights="flow").graph, CARRIED, overlapped=True
  )
  gathers = [t for t in graph.tasks if t.kind is TaskKind.ALL_GATHER]
  for gather in gathers:
    (use,) = (t for t in graph.tasks if gather.index in t.deps)
    fetched = {i for i in use.deps if graph.tasks[i].kind is TaskKind.WEIGHT_IN}
    assert fetched and fetched <= set(gather.deps)


def test_overlap_hides_collectives_that_are_shorter_than_programs():
  # Of one step, with 2 s a program and 1 s a collective, the host in no time:
  #   device   F0 1-3 F1 3-5 B2 5-7 B1 7-9 B0 9-11
  #   network  F0 0-1 F1 1-2 B2 3-4 S2 7-8 B0 8-9 S0 11-12
  plain = made_of().graph
  times = {}
  for overlapped in (False, True):
    graph = with_collectives(plain, CARRIED, overlapped=overlapped)
    seconds = {Lane.DEVICE: 2.0, Lane.NETWORK: 1.0}
    costs = [
      Cost(0.0 if t.kind is TaskKind.VALIDATE else seconds.get(t.lane, 0.0))
      for t in graph.tasks
    ]
    found = simulate(graph, costs)
    times[overlapped] = found.step_s
    uses = [t.index for t in graph.tasks if t.lane is Lane.NETWORK]
    if overlapped:
      starts = [found.starts_s[0][i] for i in uses]
      assert starts == [0, 1, 3, 7, 8, 11]
  # The first gather and the last scatter of a step are hidden by nothing.
  assert times == {False: 5 * 2 + 6, True: 5 * 2 + 2}


def test_bytes_of_all_stages_are_those_of_the_network():
  workload = workload_of(2, num_ranks=4)
  plan = Plan(bucket_bytes=1 << 18)
  config = TrainConfig(micro_batch=1, seq_len=8, accumulation=3)
  layout = workload.layout(plan, config)
  carried = collective_bytes(layout, config, workload.needs)
  sizes = [1 << 14, 2 << 14, 3 << 14, 1 << 14]
  tied = [*sizes[:3], sizes[3] + sizes[0]]
  assert carried == CollectiveBytes(
    forward=(*(4 * size for size in sizes[:3]), 0),
    backward=tuple(4 * size for size in tied),
    scatter=tuple(4 * size for size in sizes),
  )
  assert network_bytes(layout, config, workload.needs) == {
    "all_gather": 3 * 4 * (sum(sizes[:3]) + sum(tied)) + 4 * 4,
    "reduce_scatter": 3 * 4 * sum(sizes),
    "all_reduce": 12,
  }


@pytest.mark.parametrize("dispatch_s", [0.0, 1.0])
@hypothesis.settings(deadline=None, max_examples=80)
@hypothesis.given(scheduled(), st.randoms(use_true_random=False))
def test_overlap_never_slows_a_step_nor_collectives_hasten_one(
  dispatch_s, made, source
):
  if not has_fixed_lane_order(made.graph):
    return  # which of two threads' transfers comes first depends on times
  num_stages = len(made.workload.stages)
  some = [
    tuple(source.randint(0, 2) for _ in range(num_stages)) for _ in range(3)
  ]
  carried = CollectiveBytes(*some)
  seconds = {
    task.name: float(source.randint(0, 9)) for task in made.graph.tasks
  }
  steps = []
  for overlapped in (True, False):
    graph = with_collectives(made.graph, carried, overlapped=overlapped)
    costs = [Cost(seconds.get(t.name, t.bytes)) for t in graph.tasks]
    found = simulate(graph, costs, dispatch_s=dispatch_s, max_steps=6)
    steps.append(found)
  costs = [Cost(seconds[t.name]) for t in made.graph.tasks]
  steps.append(simulate(made.graph, costs, dispatch_s=dispatch_s, max_steps=6))
  overlapped, part, none = (max(found.ends_s[2]) for found in steps)
  assert none <= overlapped <= part
