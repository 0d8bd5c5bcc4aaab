"""The step graph of updates that run ahead, and of parked gradients.

Oracle: the edges of docs/design.md, written out by hand.
"""

import pytest

from sojax.graph.graph import Lane, TaskKind
from sojax.plan.account import make_account
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan
from tests.test_schedule import (
  edges,
  graph_of,
  input_bytes,
  layout_of,
  of_kind,
)


def test_a_speculative_step_has_the_edges_of_the_design():
  graph = graph_of(num_blocks=1, speculation="record3", device_buckets=1)
  assert edges(graph) == {
    "host_scalars": [],
    "forward stage=0 micro=0": [],
    "forward stage=1 micro=0": ["forward stage=0 micro=0"],
    "backward stage=2 micro=0": ["forward stage=1 micro=0"],
    "backward stage=1 micro=0": ["backward stage=2 micro=0"],
    "backward stage=0 micro=0": ["backward stage=1 micro=0"],
    "validate": [
      *(f"backward stage={stage} micro=0" for stage in (2, 1, 0)),
      "host_scalars",
    ],
    "device_update stage=0 bucket=2": ["backward stage=0 micro=0", "validate"],
    **{
      f"{name} {of_bucket}{micro}": [dep.format(of_bucket) for dep in deps]
      for of_bucket, backward in (
        ("stage=2 bucket=0", "backward stage=2 micro=0"),
        ("stage=1 bucket=1", "backward stage=1 micro=0"),
      )
      for name, micro, deps in (
        ("grad_out", " micro=0", [backward]),
        ("host_update", "", ["grad_out {} micro=0", backward]),
        ("weight_in", "", ["host_update {}"]),
        ("host_settle", "", ["host_update {}", "validate"]),
        ("weight_resend", "", ["host_settle {}"]),
      )
    },
  }
  carried = edges(graph, "prev_deps")
  assert carried["forward stage=0 micro=0"] == [
    "validate",
    "device_update stage=0 bucket=2",
  ]
  assert carried["forward stage=1 micro=0"] == [
    "weight_in stage=1 bucket=1",
    "weight_resend stage=1 bucket=1",
  ]
  order = [t.name for t in graph.tasks if t.lane is Lane.HOST]
  assert order == [
    "host_scalars",
    "host_update stage=2 bucket=0",
    "host_update stage=1 bucket=1",
    "host_settle stage=1 bucket=1",
    "host_settle stage=2 bucket=0",
  ]


@pytest.mark.parametrize("transport", ["dma", "callback"])
@pytest.mark.parametrize("accumulate", ["host", "device"])
def test_an_update_that_runs_ahead_waits_for_no_later_backward(
  transport, accumulate
):
  """Nor for a sum of another bucket, but on the host lane, by its order."""
  graph = graph_of(
    num_blocks=3,
    accumulation=2,
    speculation="record2",
    accumulate=accumulate,
    gradients_out=transport,
  )
  tasks = graph.tasks
  for update in of_kind(graph, TaskKind.HOST_UPDATE):
    assert update.stage is not None
    before, ahead = set(), [update.index]
    while ahead:
      index = ahead.pop()
      before.add(index)
      ahead += tasks[index].deps
    kinds = {tasks[i].kind for i in before}
    assert TaskKind.VALIDATE not in kinds
    last = [
      tasks[i]
      for i in before
      if tasks[i].kind is TaskKind.BACKWARD and tasks[i].micro == 1
    ]
    assert all(task.stage >= update.stage for task in last)


def test_weights_that_flow_wait_for_what_settled_them():
  graph = graph_of(num_blocks=1, weights="flow", speculation="record3")
  carried = edges(graph, "prev_deps")
  fetches = of_kind(graph, TaskKind.WEIGHT_IN)
  assert fetches
  for fetch in fetches:
    owner = {0: 2, 1: 1, 2: 0}[fetch.bucket]
    settle = f"host_settle stage={owner} bucket={fetch.bucket}"
    assert settle in carried[fetch.name]


# Gradients that wait on the device.


def test_parked_gradients_leave_a_few_buckets_ahead_of_the_updates():
  graph = graph_of(num_blocks=3, park="device", ring_slots=2, accumulation=2)
  out = of_kind(graph, TaskKind.GRAD_OUT)
  updates = of_kind(graph, TaskKind.HOST_UPDATE)
  order = [task.bucket for task in updates]
  assert order == [task.bucket for task in out] == [4, 3, 2, 1, 0]
  names = edges(graph)
  for place, task in enumerate(out):
    assert task.micro == 1
    expected = [f"backward stage={task.stage} micro=1"]
    if place >= 2:
      expected.append(updates[place - 2].name)
    assert names[task.name] == expected


def test_the_account_of_parked_gradients_is_a_few_buckets_on_the_host():
  config = TrainConfig(micro_batch=1, seq_len=8)
  layout = layout_of(5)
  accounts = [
    make_account(
      layout,
      Plan(bucket_bytes=1 << 16, park=park, ring_slots=2),
      config,
      input_bytes(5),
      {},
    )
    for park in ("device", "host")
  ]
  parked, usual = (account.host["gradients"] for account in accounts)
  assert parked == 2 * (4 << 14)
  assert usual == 7 * (4 << 14)
  assert accounts[0].device == accounts[1].device
