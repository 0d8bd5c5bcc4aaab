"""The step graph. Oracle: the edges of docs/design.md, written out by hand."""

import itertools

import pytest

from sojax.graph.graph import Lane, TaskKind
from sojax.graph.schedule import schedule
from sojax.plan.adamw import adamw
from sojax.plan.buckets import Leaf, ModelShape, plan_buckets
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan


def tied_model(num_blocks):
  """A model of embed, blocks and a head that borrows embed's table."""
  names = ["embed", *(f"block_{i}" for i in range(num_blocks)), "head"]
  leaves = [
    Leaf(name=f"{name}.w", stage=i, shape=(1 << 14,), group=0)
    for i, name in enumerate(names)
  ]
  borrowed = [()] * (num_blocks + 1) + [(0,)]
  return ModelShape(
    stage_names=tuple(names),
    leaves=tuple(leaves),
    borrowed=tuple(borrowed),
    groups=(adamw(1e-3),),
  )


def graph_of(num_blocks=2, accumulation=1, **switches):
  plan = Plan(bucket_bytes=1 << 16, **switches)
  config = TrainConfig(micro_batch=1, seq_len=8, accumulation=accumulation)
  layout = plan_buckets(
    tied_model(num_blocks),
    bucket_bytes=plan.bucket_bytes,
    elem_bytes=4,
    device_buckets=plan.device_buckets,
  )
  return schedule(layout, plan, config)


def of_kind(graph, kind):
  return [task for task in graph.tasks if task.kind is kind]


def edges(graph, dep="deps"):
  return {
    task.name: [graph.tasks[i].name for i in getattr(task, dep)]
    for task in graph.tasks
  }


def test_a_stationary_step_has_the_edges_of_the_design():
  graph = graph_of(num_blocks=1)
  assert edges(graph) == {
    "forward stage=0 micro=0": [],
    "forward stage=1 micro=0": ["forward stage=0 micro=0"],
    "backward stage=2 micro=0": ["forward stage=1 micro=0"],
    "grad_out stage=2 bucket=0": ["backward stage=2 micro=0"],
    "backward stage=1 micro=0": ["backward stage=2 micro=0"],
    "grad_out stage=1 bucket=1": ["backward stage=1 micro=0"],
    "backward stage=0 micro=0": ["backward stage=1 micro=0"],
    "grad_out stage=0 bucket=2": ["backward stage=0 micro=0"],
    "validate": [f"backward stage={stage} micro=0" for stage in (2, 1, 0)],
    **{
      name: deps
      for stage, bucket in ((2, 0), (1, 1), (0, 2))
      for name, deps in (
        (
          f"host_update stage={stage} bucket={bucket}",
          [f"grad_out stage={stage} bucket={bucket}", "validate"],
        ),
        (
          f"weight_in stage={stage} bucket={bucket}",
          [f"host_update stage={stage} bucket={bucket}"],
        ),
      )
    },
  }
  carried = edges(graph, "prev_deps")
  assert carried["forward stage=0 micro=0"] == [
    "validate",
    "weight_in stage=0 bucket=2",
  ]
  assert carried["forward stage=1 micro=0"] == ["weight_in stage=1 bucket=1"]
  assert carried["backward stage=2 micro=0"] == [
    "weight_in stage=2 bucket=0",
    "weight_in stage=0 bucket=2",
  ]
  assert carried["validate"] == ["validate"]


def test_device_buckets_skip_the_host():
  graph = graph_of(num_blocks=1, device_buckets=1)
  of_bucket = [t for t in graph.tasks if t.bucket == 2]
  (update,) = of_bucket
  assert (update.kind, update.lane) == (TaskKind.DEVICE_UPDATE, Lane.DEVICE)
  assert edges(graph)[update.name] == ["backward stage=0 micro=0", "validate"]
  carried = edges(graph, "prev_deps")["forward stage=0 micro=0"]
  assert carried == ["validate", update.name]


def test_only_the_last_micro_batch_sends_gradients():
  graph = graph_of(accumulation=3)
  last_uses = [
    t.index for t in of_kind(graph, TaskKind.BACKWARD) if t.micro == 2
  ]
  for task in of_kind(graph, TaskKind.GRAD_OUT):
    assert set(task.deps) <= set(last_uses)
  uses = [t for t in graph.tasks if t.kind in ("forward", "backward")]
  assert len(uses) == 3 * 7
  assert [t.micro for t in uses] == [0] * 7 + [1] * 7 + [2] * 7


@pytest.mark.parametrize("window", [2, 3, 5, 99])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_flow_never_has_more_weights_on_the_device_than_its_window(
  window, accumulation
):
  """Plays three steps: transfers as early as their edges let them start."""
  graph = graph_of(
    num_blocks=4, accumulation=accumulation, weights="flow", flow_window=window
  )
  uses = [t for t in graph.tasks if t.kind in ("forward", "backward")]
  fetches = of_kind(graph, TaskKind.WEIGHT_IN)
  arrivals = {
    use.index: [dep for dep in use.deps if graph.tasks[dep] in fetches]
    for use in uses
  }
  use_of = {f: use for use, group in arrivals.items() for f in group}
  ended: set[tuple[int, int]] = set()
  for step, use in itertools.product(range(3), uses):
    live = set()
    for later in (step, step + 1):
      for fetch in fetches:
        needs = [(later, dep) for dep in fetch.deps] + [
          (later - 1, dep)
          for dep in fetch.prev_deps
          if later > 0 and graph.tasks[dep].lane is Lane.DEVICE
        ]
        may_start = all(need in ended for need in needs)
        if may_start and (later, use_of[fetch.index]) not in ended:
          live.add((later, use_of[fetch.index]))
    assert len(live) <= window
    assert (step, use.index) in live
    ended.add((step, use.index))


def test_flow_issues_a_use_before_it_waits_for_the_one_before():
  graph = graph_of(num_blocks=4, weights="flow")
  uses = [t.index for t in graph.tasks if t.kind in ("forward", "backward")]
  for fetch in of_kind(graph, TaskKind.WEIGHT_IN):
    for freed in fetch.deps:
      after = uses[uses.index(freed) + 1]
      assert after < fetch.index, "the device would have nothing to do"


def test_flow_fetches_tied_weights_for_the_borrower():
  graph = graph_of(num_blocks=1, weights="flow")
  head = [t for t in of_kind(graph, TaskKind.WEIGHT_IN) if t.stage == 2]
  assert [t.bucket for t in head] == [0, 2]
  updates = {t.bucket: t.index for t in of_kind(graph, TaskKind.HOST_UPDATE)}
  for fetch in of_kind(graph, TaskKind.WEIGHT_IN):
    assert updates[fetch.bucket] in fetch.prev_deps


def test_transfers_carry_the_bytes_of_their_bucket():
  graph = graph_of(num_blocks=1)
  moved = [(t.kind, t.bytes) for t in graph.tasks if t.bytes]
  assert moved == [("grad_out", 1 << 16)] * 3 + [("weight_in", 1 << 16)] * 3
