"""The ring as edges. Oracle: a ring of buffers played bucket by bucket."""

import collections

import hypothesis
import pytest
from hypothesis import strategies as st

from sojax.graph.graph import Lane, TaskKind
from sojax.graph.ring import with_ring
from sojax.graph.simulate import simulate
from sojax.plan.account import ring_counts
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Cost
from sojax.plan.plan import Plan
from tests.simulating import schedule_of, scheduled, workload_of


def made_of(num_blocks=3, **switches):
  return schedule_of(
    workload_of(num_blocks),
    Plan(bucket_bytes=1 << 18, **switches),
    TrainConfig(micro_batch=1, seq_len=8),
  )


def updates_of(found, graph, step):
  """Starts of updates and ends of transfers, in the order of the updates."""
  update, transfer = (
    [t.index for t in graph.tasks if t.kind is kind]
    for kind in (TaskKind.HOST_UPDATE, TaskKind.WEIGHT_IN)
  )
  return [found.starts_s[step][i] for i in update], [
    found.ends_s[step][i] for i in transfer
  ]


def test_an_update_waits_for_the_transfer_that_frees_its_buffer():
  # Embed and two blocks of other shapes, each with one buffer, but stage 3
  # and the head, which have the shapes of stages 0 and 1, share theirs.
  made = made_of(ring_slots=1)
  assert ring_counts(made.layout, made.plan) == {
    (n << 14,): 1 for n in (1, 2, 3)
  }
  graph = with_ring(made.graph, made.layout, made.plan)
  seconds = {Lane.HOST: 1.0, Lane.H2D: 10.0}
  costs = [
    Cost(0.0 if t.kind is TaskKind.HOST_SCALARS else seconds.get(t.lane, 0.0))
    for t in graph.tasks
  ]
  starts, ends = updates_of(simulate(graph, costs), graph, 0)
  # The updates 0, 1, 2 need no one's buffer; 3 needs that of 0, 4 that of 1.
  assert starts == [0, 1, 2, 11, 21]
  assert ends == [11, 21, 31, 41, 51]
  starts, _ = updates_of(simulate(made.graph, costs), made.graph, 0)
  assert starts == [0, 1, 2, 3, 4]


def test_without_a_ring_the_graph_stays_as_it_is():
  for switches in ({"weights": "flow"}, {"device_buckets": 5}):
    made = made_of(**switches)
    assert with_ring(made.graph, made.layout, made.plan) is made.graph


def test_updates_that_are_settled_late_take_their_buffers_then():
  made = made_of(ring_slots=1, speculation="record2", max_record_bytes=1 << 18)
  for ahead in (True, False):
    graph = with_ring(made.graph, made.layout, made.plan, ahead=ahead)
    changed = {
      ours.kind
      for ours, theirs in zip(graph.tasks, made.graph.tasks, strict=True)
      if ours != theirs
    }
    settles = TaskKind.HOST_SETTLE in changed
    assert changed and settles is not ahead


def flows(made, bucket):
  weights = made.plan.weights_by_stage(made.layout.model.num_stages)
  return weights[made.layout.buckets[bucket].stage] != "stationary"


def test_the_weights_of_stages_that_flow_take_no_buffers():
  """Stage 1 has none of its shape, stage 3 and 0 share one without waiting."""
  mix = ("stationary", "flow", "stationary", "flow_once", "stationary")
  made = made_of(ring_slots=1, weights=mix)
  assert ring_counts(made.layout, made.plan) == {
    (n << 14,): 1 for n in (1, 2, 3)
  }
  graph = with_ring(made.graph, made.layout, made.plan)
  for stage in (1, 3):
    (bucket,) = made.layout.of_stage(stage)
    for ours, theirs in zip(graph.tasks, made.graph.tasks, strict=True):
      assert ours.bucket != bucket.index or ours == theirs


@pytest.mark.parametrize("ahead", [True, False])
@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(scheduled(), st.randoms(use_true_random=False))
def test_no_more_buffers_are_out_than_there_are(ahead, made, source):
  graph = with_ring(made.graph, made.layout, made.plan, ahead=ahead)
  counts = ring_counts(made.layout, made.plan)
  seconds = [float(source.randint(1, 9)) for _ in graph.tasks]
  found = simulate(graph, [Cost(s) for s in seconds], max_steps=5)
  settled = {t.bucket for t in graph.tasks if t.kind is TaskKind.HOST_SETTLE}
  changes = collections.defaultdict(list)
  for task in graph.tasks:
    late = not ahead and task.bucket in settled
    taker = TaskKind.HOST_SETTLE if late else TaskKind.HOST_UPDATE
    giver = TaskKind.WEIGHT_RESEND if late else TaskKind.WEIGHT_IN
    if task.kind not in (taker, giver):
      continue
    if not counts or flows(made, task.bucket):
      continue
    for unit in made.layout.buckets[task.bucket].units:
      for starts, ends in zip(found.starts_s, found.ends_s, strict=True):
        if task.kind is taker:
          changes[unit.shape].append((starts[task.index], 1))
        else:
          changes[unit.shape].append((ends[task.index], -1))
  for shape, of_shape in changes.items():
    out = 0
    for _, change in sorted(of_shape):
      out += change
      assert out <= counts[shape]
