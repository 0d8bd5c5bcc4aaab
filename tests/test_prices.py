"""Prices of whole graphs: each task's cost is the one that its kind has."""

import pytest

from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.graph.prices import price
from sojax.graph.schedule import schedule
from sojax.plan.config import TrainConfig
from sojax.plan.costs import NOTHING, Costs
from sojax.plan.plan import Plan
from tests.test_costs import MACHINE, workload


def priced(accumulation=1, ahead=True, taken_back=False, **switches):
  """Returns the costs, and (task, price) for each task of a step."""
  plan = Plan(**switches)
  config = TrainConfig(
    micro_batch=1, seq_len=8, accumulation=accumulation, precision="bf16"
  )
  work = workload()
  layout = work.layout(plan, config)
  graph = schedule(layout, plan, config, work.input_bytes)
  costs = Costs(layout, plan, config, work, MACHINE)
  found = price(graph, costs, ahead=ahead, taken_back=taken_back)
  return costs, [*zip(graph.tasks, found, strict=True)]


def of(tasks, kind):
  """Returns the prices of tasks of a kind, by bucket or stage, micro-batch."""
  return {
    (task.stage if task.bucket is None else task.bucket, task.micro): cost
    for task, cost in tasks
    if task.kind is kind
  }


def test_a_step_that_waits_is_priced_by_kind():
  costs, tasks = priced(accumulation=2, device_buckets=1, activations="offload")
  assert of(tasks, TaskKind.HOST_SCALARS) == {(None, 0): costs.host_scalars()}
  assert of(tasks, TaskKind.VALIDATE) == {(None, 0): costs.validate()}
  assert of(tasks, TaskKind.FORWARD) == {
    (stage, micro): costs.forward(stage) for stage in (0, 1) for micro in (0, 1)
  }
  assert of(tasks, TaskKind.BACKWARD) == {
    (stage, micro): costs.backward(stage, micro == 1)
    for stage in (0, 1, 2)
    for micro in (0, 1)
  }
  assert of(tasks, TaskKind.GRAD_OUT) == {
    (bucket, 1): costs.grad_out(bucket) for bucket in (0, 1)
  }
  assert of(tasks, TaskKind.HOST_UPDATE) == {
    (bucket, 0): costs.host_update(bucket, ahead=False) for bucket in (0, 1)
  }
  assert of(tasks, TaskKind.WEIGHT_IN) == {
    (bucket, 0): costs.weight_in(bucket) for bucket in (0, 1)
  }
  assert of(tasks, TaskKind.DEVICE_UPDATE) == {(2, 0): costs.device_update(2)}
  assert of(tasks, TaskKind.ACTIVATION_OUT) == {
    (1, micro): costs.activation(1, out=True) for micro in (0, 1)
  }
  assert of(tasks, TaskKind.ACTIVATION_IN) == {
    (1, micro): costs.activation(1, out=False) for micro in (0, 1)
  }


def test_sums_on_the_host_are_priced_by_micro_batch():
  costs, tasks = priced(accumulation=3, accumulate="host")
  assert of(tasks, TaskKind.HOST_ACCUMULATE) == {
    (bucket, micro): costs.host_accumulate(bucket, first_micro=micro == 0)
    for bucket in (0, 1, 2)
    for micro in (0, 1, 2)
  }


@pytest.mark.parametrize(
  ("settlement", "sent_again"),
  [("commit", False), ("redo", True), ("late", True)],
)
def test_updates_that_may_run_ahead_are_priced_by_what_becomes_of_them(
  settlement, sent_again
):
  ahead = settlement != "late"
  costs, tasks = priced(
    speculation="record3", ahead=ahead, taken_back=settlement == "redo"
  )
  for bucket in (0, 1, 2):
    key = bucket, 0
    update = costs.host_update(bucket, ahead=True) if ahead else NOTHING
    sent = costs.weight_in(bucket)
    assert of(tasks, TaskKind.HOST_UPDATE)[key] == update
    assert of(tasks, TaskKind.WEIGHT_IN)[key] == (sent if ahead else NOTHING)
    assert of(tasks, TaskKind.HOST_SETTLE)[key] == costs.host_settle(
      bucket, settlement
    )
    assert of(tasks, TaskKind.WEIGHT_RESEND)[key] == (
      sent if sent_again else NOTHING
    )


def test_buckets_without_a_record_are_priced_as_those_that_wait():
  # Room for the records of two buckets.
  costs, tasks = priced(speculation="record2", max_record_bytes=6 << 20)
  ahead = [costs.host_update(bucket, ahead=True) for bucket in (0, 1)]
  assert of(tasks, TaskKind.HOST_UPDATE) == {
    (0, 0): ahead[0],
    (1, 0): ahead[1],
    (2, 0): costs.host_update(2, ahead=False),
  }
  assert len(of(tasks, TaskKind.HOST_SETTLE)) == 2


def test_weights_that_flow_are_fetched_whatever_becomes_of_updates():
  costs, tasks = priced(weights="flow", speculation="record3", ahead=False)
  fetched = [cost for task, cost in tasks if task.kind is TaskKind.WEIGHT_IN]
  assert fetched == [costs.weight_in(0)] * 5  # of forwards 0, 1; backwards


def test_collectives_are_priced_by_their_bytes():
  costs, _ = priced()
  graph = StepGraph(
    tuple(
      Task(index=place, kind=kind, lane=Lane.NETWORK, stage=0, bytes=10**6)
      for place, kind in enumerate(
        (TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER)
      )
    )
  )
  assert price(graph, costs) == (
    costs.all_gather(10**6),
    costs.reduce_scatter(10**6),
  )
