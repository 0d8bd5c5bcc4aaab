"""The step graph where the host adds up micro-batches. Oracle: docs/design.md,
its edges written out by hand."""

import pytest

from sojax.graph.graph import Lane, TaskKind
from sojax.graph.schedule import schedule
from sojax.plan.account import make_account
from sojax.plan.buckets import plan_buckets
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan
from tests.test_buckets import model_shape
from tests.test_schedule import account_of, edges, graph_of, of_kind

K = TaskKind


def only_stage(accumulation, **switches):
  """Returns graph and account of a model of one stage and two buckets."""
  model = model_shape([(0, (1 << 14,), 0), (0, (1 << 14,), 0)])
  layout = plan_buckets(model, bucket_bytes=1 << 16, elem_bytes=4)
  plan = Plan(bucket_bytes=1 << 16, accumulate="host", **switches)
  config = TrainConfig(micro_batch=1, seq_len=8, accumulation=accumulation)
  account = make_account(layout, plan, config, [32], {})
  return schedule(layout, plan, config, [32]), account


def before(graph, index):
  """Returns all that ends before a task may be issued, as (steps ago, index).

  Through whole steps: what a task waits for had its own to wait for.
  """
  found, new = set(), {(0, index)}
  while new:
    ago, i = new.pop()
    task = graph.tasks[i]
    needs = {(ago, dep) for dep in task.deps}
    if ago == 0:
      needs |= {(1, dep) for dep in task.prev_deps}
    new |= needs - found
    found |= needs
  return found


def by_name(graph):
  return {task.name: task.index for task in graph.tasks}


def test_every_micro_batch_goes_out_and_the_last_is_validated():
  graph = graph_of(num_blocks=1, accumulation=2, accumulate="host")
  of_micro = {
    "forward stage=0": [],
    "forward stage=1": ["forward stage=0"],
    "backward stage=2": ["forward stage=1"],
    "grad_out stage=2 bucket=0": ["backward stage=2"],
    "host_accumulate stage=2 bucket=0": ["grad_out stage=2 bucket=0"],
    "backward stage=1": ["backward stage=2"],
    "grad_out stage=1 bucket=1": ["backward stage=1"],
    "host_accumulate stage=1 bucket=1": ["grad_out stage=1 bucket=1"],
    "backward stage=0": ["backward stage=1"],
    "grad_out stage=0 bucket=2": ["backward stage=0"],
    "host_accumulate stage=0 bucket=2": ["grad_out stage=0 bucket=2"],
  }
  expected = {
    f"{name} micro={micro}": [f"{dep} micro={micro}" for dep in deps]
    for micro in range(2)
    for name, deps in of_micro.items()
  }
  expected["host_scalars"] = []
  expected["forward stage=0 micro=1"] = ["backward stage=0 micro=0"]
  sums = [f"stage={stage} bucket={2 - stage}" for stage in (2, 1, 0)]
  for stage, name in zip((2, 1, 0), sums, strict=True):
    expected[f"backward stage={stage} micro=1"].append(
      f"host_accumulate {name} micro=0"
    )
  expected["validate"] = [
    *(f"backward stage={stage} micro=1" for stage in (2, 1, 0)),
    *(f"host_accumulate {name} micro=1" for name in sums),
    "host_scalars",
  ]
  for name in sums:
    expected[f"host_update {name}"] = [
      f"host_accumulate {name} micro=1",
      "validate",
    ]
    expected[f"weight_in {name}"] = [f"host_update {name}"]
  assert edges(graph) == expected
  assert {t.lane for t in of_kind(graph, K.HOST_ACCUMULATE)} == {Lane.HOST}
  out = [t.bytes for t in of_kind(graph, K.GRAD_OUT)]
  assert out == [1 << 16] * 6


@pytest.mark.parametrize("weights", ["stationary", "flow"])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 5])
def test_at_most_one_micro_batch_of_a_bucket_is_on_the_host(
  weights, accumulation
):
  switches = {"accumulation": accumulation, "weights": weights}
  graph = graph_of(accumulate="host", **switches)
  check_places(graph, accumulation, 1)
  account, _ = account_of(2, accumulate="host", **switches)
  check_account(account, elems=4 << 14, num_grads=1)


@pytest.mark.parametrize("gradients_out", ["dma", "callback"])
@pytest.mark.parametrize("weights", ["stationary", "flow"])
@pytest.mark.parametrize("accumulation", [1, 2, 3, 5])
def test_at_most_two_are_of_a_model_of_one_stage(
  weights, accumulation, gradients_out
):
  switches = {"weights": weights, "gradients_out": gradients_out}
  graph, account = only_stage(accumulation, **switches)
  check_places(graph, accumulation, 2)
  if gradients_out == "callback":  # programs do not return them
    assert account.device["gradients"] == 0
    account.device["gradients"] = account.host["gradients"]
  check_account(account, elems=2 << 14, num_grads=min(2, accumulation))


def check_places(graph, accumulation, num_places):
  """A gradient is let out once the one whose place it takes is added up, and
  backward waits no longer than that."""
  names = by_name(graph)
  seen = 0
  for out in of_kind(graph, K.GRAD_OUT):
    of_bucket = f"stage={out.stage} bucket={out.bucket}"
    for micro in range(accumulation):
      added = (0, names[f"host_accumulate {of_bucket} micro={micro}"])
      waits = added in before(graph, out.index)
      assert waits == (micro <= out.micro - num_places)
      seen += waits
  assert bool(seen) == (accumulation > num_places)


def check_account(account, elems, num_grads):
  assert account.host["gradients"] == 4 * num_grads * elems
  assert account.device["gradients"] == 4 * num_grads * elems
  assert account.host["accumulators"] == 4 * elems
  assert account.device["partial_sums"] == 0


def test_the_account_has_the_sums_of_device_buckets_on_the_device():
  for accumulation in (1, 3):
    switches = {"device_buckets": 1, "accumulation": accumulation}
    account, _ = account_of(2, accumulate="host", **switches)
    partial = (4 << 14) * (accumulation > 1)
    assert account.host["accumulators"] == 3 * (4 << 14)
    assert account.device["partial_sums"] == partial
    account, _ = account_of(2, **switches)
    assert account.host["accumulators"] == 0
    assert account.device["partial_sums"] == 4 * partial


@pytest.mark.parametrize("weights", ["stationary", "flow"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_new_sums_begin_after_the_update_that_takes_the_old_ones(
  weights, accumulation
):
  """By the edges alone; and on the host lane, which keeps the schedule."""
  for graph in (
    graph_of(accumulate="host", accumulation=accumulation, weights=weights),
    only_stage(accumulation, weights=weights)[0],
  ):
    names = by_name(graph)
    updates = of_kind(graph, K.HOST_UPDATE)
    assert updates
    for update in updates:
      of_bucket = f"stage={update.stage} bucket={update.bucket}"
      begins = names[f"host_accumulate {of_bucket} micro=0"]
      assert (1, update.index) in before(graph, begins)
    host = [task for task in graph.tasks if task.lane is Lane.HOST]
    kinds = [task.kind for task in host]
    order = [K.HOST_SCALARS, K.HOST_ACCUMULATE, K.HOST_UPDATE]
    assert kinds == sorted(kinds, key=order.index)
    order = [(t.micro, t.bucket) for t in of_kind(graph, K.HOST_ACCUMULATE)]
    assert order == sorted(order)


def test_device_buckets_are_added_up_on_the_device():
  graph = graph_of(accumulation=2, accumulate="host", device_buckets=2)
  summed = [(t.bucket, t.micro) for t in of_kind(graph, K.HOST_ACCUMULATE)]
  assert summed == [(0, 0), (1, 0), (0, 1), (1, 1)]
  all_edges = edges(graph)
  for stage, bucket in ((1, 2), (0, 3)):
    update = f"device_update stage={stage} bucket={bucket}"
    assert all_edges[update] == [f"backward stage={stage} micro=1", "validate"]
