"""Mixed residency in schedule and account. Oracle: sets of what is there."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from sojax.graph.graph import Lane, TaskKind
from sojax.graph.schedule import schedule
from sojax.graph.simulate import simulate
from sojax.plan.account import make_account
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Cost
from sojax.plan.plan import WEIGHTS, Plan
from tests.simulating import schedule_of, workload_of
from tests.test_schedule import graph_of, input_bytes, layout_of, of_kind

S, F, ONCE = "stationary", "flow", "flow_once"


def uses_of(graph):
  return [t for t in graph.tasks if t.kind in ("forward", "backward")]


def fetches_of(graph):
  """Says which buckets are fetched for each use of the first micro-batch."""
  fetched = {}
  for use in uses_of(graph):
    if use.micro == 0:
      deps = [graph.tasks[dep] for dep in use.deps]
      fetched[use.kind[0] + str(use.stage)] = [
        dep.bucket for dep in deps if dep.kind is TaskKind.WEIGHT_IN
      ]
  return fetched


@pytest.mark.parametrize(
  ("weights", "fetched"),
  [
    # Bucket 3 is embed's, 2 and 1 the blocks', 0 the head's.
    ((S, S, S, S), [[], [], [], [], [], [], []]),
    ((F, F, F, F), [[3], [2], [1], [0, 3], [1], [2], [3]]),
    ((ONCE, ONCE, ONCE, ONCE), [[3], [2], [1], [0, 3], [], [], []]),
    ((S, F, ONCE, F), [[], [2], [1], [0], [], [2], []]),
    ((ONCE, S, F, S), [[3], [], [1], [3], [1], [], []]),
  ],
  ids=str,
)
def test_what_flows_is_fetched_for_its_stage_and_for_who_borrows_it(
  weights, fetched
):
  graph = graph_of(num_blocks=2, weights=weights)
  names = ["f0", "f1", "f2", "b3", "b2", "b1", "b0"]
  assert fetches_of(graph) == dict(zip(names, fetched, strict=True))
  sent = {t.bucket for t in of_kind(graph, TaskKind.HOST_UPDATE)}
  by_update = {
    task.bucket
    for task in of_kind(graph, TaskKind.WEIGHT_IN)
    if any(graph.tasks[dep].lane is Lane.HOST for dep in task.deps)
  }
  stationary = {3 - stage for stage, w in enumerate(weights) if w == S}
  assert sent == {0, 1, 2, 3}
  assert by_update == stationary


def test_a_mixed_step_has_the_edges_of_the_design():
  """Flowing uses are F1, B3 and B1; the window is 2 of them."""
  mix = (S, F, S, ONCE)
  graph = graph_of(num_blocks=2, weights=mix, speculation="record3")
  computing = [
    (task.name, task.deps, task.prev_deps)
    for task in graph.tasks[: of_kind(graph, TaskKind.VALIDATE)[0].index]
    if task.kind in ("forward", "backward", "weight_in")
    and not any(graph.tasks[dep].lane is Lane.HOST for dep in task.deps)
  ]
  named = {task.name: task.index for task in graph.tasks}
  validate = named["validate"]
  settled = [named[f"host_settle stage={3 - b} bucket={b}"] for b in range(4)]
  sent = {
    bucket: (
      named[f"weight_in stage={3 - bucket} bucket={bucket}"],
      named[f"weight_resend stage={3 - bucket} bucket={bucket}"],
    )
    for bucket in (1, 3)
  }
  f0, f1, f2 = (named[f"forward stage={n} micro=0"] for n in range(3))
  b0, b1, b2, b3 = (named[f"backward stage={n} micro=0"] for n in range(4))
  assert computing == [
    ("weight_in stage=1 bucket=2", (), (settled[2], b3)),
    ("forward stage=0 micro=0", (), (validate, *sent[3])),
    ("forward stage=1 micro=0", (f0, f1 - 2), ()),
    ("weight_in stage=3 bucket=0", (), (settled[0], b1)),
    ("forward stage=2 micro=0", (f1,), sent[1]),
    ("backward stage=3 micro=0", (f2, f2 - 1), sent[3]),
    ("weight_in stage=1 bucket=2", (f1,), (settled[2],)),
    ("backward stage=2 micro=0", (b3,), sent[1]),
    ("backward stage=1 micro=0", (b2, b2 - 1), ()),
    ("backward stage=0 micro=0", (b1,), sent[3]),
  ]


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_what_is_sent_from_in_place_has_left_before_it_is_settled(master):
  """Stationary weights of split masters; others have a ring, or no transfer."""
  plan = Plan(
    weights=(S, F, ONCE, S),
    bucket_bytes=1 << 16,
    master=master,
    speculation="record3",
  )
  config = TrainConfig(micro_batch=1, seq_len=8, precision="bf16")
  graph = schedule(layout_of(2), plan, config, input_bytes(2))
  waits = {
    task.stage
    for task in of_kind(graph, TaskKind.HOST_SETTLE)
    if any(graph.tasks[d].kind is TaskKind.WEIGHT_IN for d in task.deps)
  }
  assert waits == ({0, 3} if master == "split" else set())


@pytest.mark.parametrize("window", [2, 3, 99])
def test_forward_begins_before_the_weights_of_late_stages_are_updated(window):
  """They are fetched `window - 1` uses ahead, though there is room."""
  mix = (*[S] * 5, F)
  graph = graph_of(num_blocks=4, weights=mix, flow_window=window)
  (fetch,) = (t for t in of_kind(graph, TaskKind.WEIGHT_IN) if not t.deps)
  before = [use.stage for use in uses_of(graph) if use.index < fetch.index]
  assert before == [*range(5)][: max(5 - window + 1, 0)]


def played_bytes(graph, plan, accumulation):
  """Returns the most elements that are there, of what flows and in all.

  Plays three steps, with all transfers as early as their edges let them start
  and every use as late; a set of what is on the device.
  """
  elems = {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
  uses = uses_of(graph)
  fetched_for = {
    dep: use
    for use in uses
    for dep in use.deps
    if graph.tasks[dep].kind is TaskKind.WEIGHT_IN
  }
  last_of = {}
  for use in uses:
    borrower = plan.weights if isinstance(plan.weights, str) else None
    where = borrower or plan.weights[use.stage]
    stay = where == ONCE and use.kind == "forward"
    last_of[use.index] = next(
      other.index
      for other in uses
      if not stay
      and other is use
      or stay
      and (other.kind, other.stage, other.micro)
      == ("backward", use.stage, use.micro)
    )
  most = 0
  ended = set()
  for step, use in itertools.product(range(3), uses):
    there = 0
    for later, (fetch, taker) in itertools.product(
      (step, step + 1), fetched_for.items()
    ):
      task = graph.tasks[fetch]
      may_start = all((later, dep) in ended for dep in task.deps) and all(
        later == 0 or (later - 1, dep) in ended
        for dep in task.prev_deps
        if graph.tasks[dep].lane is Lane.DEVICE
      )
      gone = (later, last_of[taker.index]) in ended
      there += elems[task.bucket] if may_start and not gone else 0
    most = max(most, there)
    ended.add((step, use.index))
  return most * (1 << 16)


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
  st.lists(st.sampled_from(WEIGHTS), min_size=6, max_size=6),
  st.sampled_from([2, 3, 5, 99]),
  st.integers(1, 3),
)
def test_the_device_has_what_flows_in_the_window_and_what_stays(
  mix, window, accumulation
):
  """As much as the account says, to the byte: equal stages of 64 KiB."""
  switches = {"weights": tuple(mix), "flow_window": window}
  graph = graph_of(num_blocks=4, accumulation=accumulation, **switches)
  plan = Plan(bucket_bytes=1 << 16, **switches)
  config = TrainConfig(micro_batch=1, seq_len=8, accumulation=accumulation)
  account = make_account(layout_of(4), plan, config, input_bytes(4), {})
  stationary = mix.count(S) << 16
  most = played_bytes(graph, plan, accumulation)
  assert account.device["weights"] == stationary + most
  assert account.host["working_copy"] == (6 << 16) - stationary
  in_ring = min(2, mix.count(S))
  assert account.host["ring"] == in_ring << 16


def test_the_account_of_a_mix_adds_up_its_parts():
  """All sizes differ: embed 1, blocks 2, 3, 1, head 2 units of 32 KiB."""
  unit = 2 << 14
  config = TrainConfig(micro_batch=1, seq_len=8, precision="bf16")

  def account(weights, **switches):
    plan = Plan(weights=weights, bucket_bytes=1 << 17, **switches)
    made = schedule_of(workload_of(3), plan, config)
    inputs = made.workload.input_bytes
    found = make_account(made.layout, plan, config, inputs, {})
    where = [("device", "weights"), ("host", "working_copy"), ("host", "ring")]
    return [getattr(found, space)[name] / unit for space, name in where]

  # In the ring are two buckets of each shape, or as many as there are.
  assert account(S) == [9, 0, 2 + 4 + 3]
  # Embed and block 2 stay; block 1 is there for B1 and for F1 that follows it.
  assert account((S, F, S, F, F)) == [1 + 3 + (2 + 2), 2 + 1 + 2, 1 + 3]
  # The head fetches embed, of which it borrows a table.
  assert account((F, S, S, S, S)) == [2 + 3 + 1 + 2 + 2, 1, 4 + 3 + 1]
  # At the turn all is there that stays, and the window's head and block 3.
  assert account((ONCE, ONCE, S, F, S)) == [
    3 + 2 + (1 + 2) + (1 + 1),
    1 + 2 + 1,
    3 + 2,
  ]
  # Split masters have a copy of all, and no ring.
  assert account((S, F, S, F, F), master="split") == [8, 9, 0]
  # With float32 on the wire a flowing leaf is there twice during its use.
  assert account((S, S, S, S, F), weight_cast="device") == [
    2 * 7 + (2 * 2 + 2),
    2 * 2,
    2 * 7,
  ]


def test_device_buckets_may_be_those_of_stationary_stages_only():
  config = TrainConfig(micro_batch=1, seq_len=8)

  def layout(device_buckets, *weights):
    plan = Plan(
      weights=weights, bucket_bytes=1 << 16, device_buckets=device_buckets
    )
    return schedule_of(workload_of(1), plan, config).layout

  made = layout(3, S, S, F)  # embed's bucket and the block's two
  assert [b.stage for b in made.buckets if b.on_device] == [1, 1, 0]
  for weights, allowed in (((S, F, S), 1), ((ONCE, S, S), 0)):
    match = f"lower device_buckets to {allowed}"
    for too_many in range(allowed + 1, 4):
      with pytest.raises(ValueError, match=match):
        layout(too_many, *weights)
    assert layout(allowed, *weights)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
  st.lists(st.sampled_from(WEIGHTS), min_size=5, max_size=5),
  st.sampled_from([2, 3, 99]),
  st.integers(1, 2),
  st.sampled_from(["recompute", "offload"]),
)
def test_no_mix_comes_to_a_stop(mix, window, accumulation, activations):
  """A simulation raises if nothing can go on."""
  graph = graph_of(
    num_blocks=3,
    accumulation=accumulation,
    weights=tuple(mix),
    flow_window=window,
    activations=activations,
  )
  found = simulate(graph, [Cost(1.0)] * len(graph.tasks))
  assert found.step_s > 0
