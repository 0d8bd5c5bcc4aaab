"""Updates that run ahead of validation. Oracle: a plan that waits, in bits."""

import threading

import numpy as np
import pytest

import sojax
from sojax.graph.graph import TaskKind
from sojax.plan.config import LossScale
from sojax.plan.records import record_bytes
from sojax.runtime.speculation import NormSource, NormWatch
from tests import layered
from tests.speculating import (
  SCHEMES,
  let_all_run_ahead,
  spiking_batches,
  trainer,
)
from tests.training import (
  ROWS,
  assert_same_bits,
  batches,
  config,
  mesh_of,
  optimizer,
  state_of,
)

INFINITE, SPIKES = (3, 11), (5, 6, 14)

VARIANTS = {
  "plain": {},
  "flow": {"weights": "flow"},
  "device-buckets": {"device_buckets": 3},
  "callback": {"gradients_out": "callback"},
  "casts-on-device": {"grad_cast": "device", "weight_cast": "device"},
  "small-ring": {"ring_slots": 1},
  "split": {"master": "split"},
  "split-flow": {"master": "split", "weights": "flow"},
  "few-records": {"max_record_bytes": 250_000},
  "no-escapes": {"escape_bytes_per_param": 0},
}


def run(ours, data):
  """Returns the losses, norms, outcomes and the state after some batches."""
  with ours:
    metrics = [ours.step(batch) for batch in data]
    figures = [(m.loss, m.grad_norm, m.clipped, m.skipped) for m in metrics]
    return figures, metrics, state_of(ours)


def assert_same_run(ours, theirs):
  np.testing.assert_array_equal(np.array(ours[0]), np.array(theirs[0]))
  assert_same_bits(ours[2], theirs[2])


@pytest.fixture(scope="module")
def waiting():
  """Runs of plans that wait, by their variant."""
  runs = {}

  def find(variant, precision, clip_norm):
    key = variant, precision, clip_norm
    if key not in runs:
      data = spiking_batches(18, infinite=INFINITE, spikes=SPIKES)
      runs[key] = run(
        trainer(VARIANTS[variant], precision=precision, clip_norm=clip_norm),
        data,
      )
    return runs[key]

  return find


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_taking_every_update_back_gives_the_bits_of_waiting(
  variant, scheme, waiting, monkeypatch
):
  """Every update runs ahead, also of steps that are clipped and skipped."""
  if scheme == "pingpong" and "split" in variant:
    pytest.skip("the plan is refused")
  plan = VARIANTS[variant] | {"speculation": scheme, "speculate": "always"}
  ours = trainer(plan, precision="bf16", clip_norm=1.7)
  let_all_run_ahead(ours, monkeypatch)
  data = spiking_batches(18, infinite=INFINITE, spikes=SPIKES)
  figures = run(ours, data)
  assert_same_run(figures, waiting(variant, "bf16", 1.7))
  num_ahead = {m.speculated for m in figures[1]}
  trained = len(ours.layout.updated_by_host)
  (expected,) = num_ahead
  if variant == "few-records":
    assert 0 < expected < trained
  else:
    assert expected == trained
  outcomes = {
    name: sum(getattr(m, name) > 0 for m in figures[1])
    for name in ("committed", "redone", "undone")
  }
  assert outcomes["undone"] == len(INFINITE)
  assert outcomes["redone"] > len(SPIKES)
  assert outcomes["committed"] > 3
  assert sum(outcomes.values()) == len(data), (
    "no bucket of a step is an odd one"
  )


@pytest.mark.parametrize("speculate", ["always", "adaptive"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_speculation_as_it_comes_gives_the_bits_of_waiting(
  speculate, precision, waiting
):
  data = spiking_batches(18, infinite=INFINITE, spikes=SPIKES)
  plan = {"speculation": "record3", "speculate": speculate}
  ours = run(trainer(plan, precision=precision, clip_norm=1.7), data)
  assert_same_run(ours, waiting("plain", precision, 1.7))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("accumulate", ["host", "device"])
def test_ranks_and_micro_batches_have_one_verdict(
  ranks, accumulate, monkeypatch
):
  data = spiking_batches(8, infinite=(2,), spikes=(4,), rows=2 * ROWS, seed=3)

  def start(plan):
    return trainer(
      {"accumulate": accumulate, **plan},
      mesh=mesh_of(ranks),
      micro_batch=ROWS // ranks,
      accumulation=2,
      precision="bf16",
      clip_norm=1.7,
    )

  theirs = run(start({}), data)
  ours = start({"speculation": "record2", "speculate": "always"})
  let_all_run_ahead(ours, monkeypatch)
  ours = run(ours, data)
  assert_same_run(ours, theirs)
  assert all(m.speculated for m in ours[1])
  assert {m.undone > 0 for m in ours[1]} == {True, False}
  assert {m.redone > 0 for m in ours[1]} == {True, False}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_gradients_parked_on_the_device_have_the_same_update(
  slots, weights, waiting
):
  data = spiking_batches(18, infinite=INFINITE, spikes=SPIKES)
  plan = {"park": "device", "ring_slots": slots, "weights": weights}
  ours = run(trainer(plan, precision="bf16", clip_norm=1.7), data)
  assert_same_run(ours, waiting("plain", "bf16", 1.7))


@pytest.mark.parametrize(
  ("scheme", "switches"),
  [
    *((scheme, {"gradients_out": "dma"}) for scheme in SCHEMES),
    *((scheme, {"gradients_out": "callback"}) for scheme in SCHEMES),
    ("record3", {"accumulate": "host"}),
    ("record3", {"weights": "flow"}),
    ("record2", {"grad_window": 1}),
  ],
  ids=str,
)
def test_an_update_begins_while_backward_still_runs(
  scheme, switches, monkeypatch
):
  """Backward of the first layer waits until the last one's is updated."""
  monkeypatch.setattr(NormWatch, "objection", lambda *args: None)
  updated = threading.Event()

  def wait_for_update():
    assert updated.wait(60), "no update ran ahead of backward"

  model = layered.Staged(on_backward=wait_for_update)
  plan = {"speculation": scheme, "speculate": "always", **switches}
  with sojax.Trainer(model, optimizer(), config(clip_norm=1e-3), plan) as ours:
    actions = ours._executor._actions
    update = actions[TaskKind.HOST_UPDATE]

    def noting_update(task, step):
      result = update(task, step)
      updated.set()
      return result

    actions[TaskKind.HOST_UPDATE] = noting_update
    for batch in batches(3):
      updated.clear()
      metrics = ours.step(batch)
      ours.drain()
      assert metrics.clipped
      assert metrics.redone > 0
      spans = ours.timeline().steps(metrics.step, metrics.step).spans
      last_backward = max(
        s.end_s for s in spans if s.name.startswith("backward")
      )
      updates = [s for s in spans if s.name.startswith("host_update")]
      assert min(s.start_s for s in updates) < last_backward
      assert min(s.end_s for s in updates) < last_backward


def test_a_norm_past_the_bound_ends_speculation_within_the_step():
  """The head's own norm has small gradients; a block's are too large."""
  data = spiking_batches(4, spikes=(2,), infinite=(3,))
  plan = {"speculation": "record3", "speculate": "always"}
  with trainer(plan, clip_norm=50.0) as ours:
    let_all_run_ahead(ours)
    metrics = [ours.step(batch) for batch in data]
    num_buckets = len(ours.layout.updated_by_host)
    good, also_good, spike, infinite = (m.speculated for m in metrics)
    assert good == also_good == num_buckets
    assert spike <= 1, "only the head's, which is there first"
    assert infinite == 0
    assert [m.committed for m in metrics] == [num_buckets, num_buckets, 0, 0]
    notes = {s.note for s in ours.timeline().spans if s.step > 1}
    assert "waits: the norm is past the clip norm" in notes
    assert "waits: a gradient is not finite" in notes


@pytest.mark.parametrize("plan", [{"gradients_out": "callback"}, {}])
def test_a_model_of_one_stage_ends_speculation_by_the_hosts_own_sums(plan):
  data = batches(2)
  plan = {"speculation": "record3", "speculate": "always", **plan}
  model = layered.Whole(dim=64)
  with sojax.Trainer(
    model,
    optimizer(),
    config(clip_norm=1e-6),
    {"bucket_bytes": 1 << 16, **plan},
  ) as ours:
    let_all_run_ahead(ours)
    metrics = [ours.step(batch) for batch in data]
    assert [m.speculated for m in metrics] == [1, 1]


@pytest.mark.parametrize("source", NormSource)
def test_the_watch_objects_once_the_norm_must_be_clipped(source):
  watch = NormWatch(2.0, source)
  others = [x for x in NormSource if x is not source]
  watch.add(source, np.array([8.0, 8.0], np.float32))
  for other in others:
    watch.add(other, np.array([np.inf]))
  assert watch.objection(0.5) is None, "4 / 2 is the bound itself"
  watch.add(source, np.float32(1e-3))
  assert "clip norm" in watch.objection(0.5)
  assert watch.objection(0.25) is None
  watch.add(source, np.float32(np.nan))
  assert "not finite" in watch.objection(0.25)


def test_the_watch_has_no_bound_without_a_clip_norm():
  watch = NormWatch(None, NormSource.STAGES)
  watch.add(NormSource.STAGES, np.float64(1e300))
  assert watch.objection(1.0) is None
  watch.add(NormSource.STAGES, np.float64(np.inf))
  assert "not finite" in watch.objection(1.0)


def test_the_metrics_say_what_became_of_a_step(monkeypatch):
  data = spiking_batches(5, spikes=(3,), infinite=(4,))
  plan = {
    "speculation": "record3",
    "speculate": "always",
    "escape_bytes_per_param": 12,
  }
  with trainer(plan, clip_norm=50.0) as ours:
    let_all_run_ahead(ours, monkeypatch)
    metrics = [ours.step(batch) for batch in data]
    num_buckets = len(ours.layout.updated_by_host)
    counts = [(m.speculated, m.committed, m.redone, m.undone) for m in metrics]
    assert counts[2:] == [
      (num_buckets, num_buckets, 0, 0),
      (num_buckets, 0, num_buckets, 0),
      (num_buckets, 0, 0, num_buckets),
    ]
    assert metrics[2].clip_scale == 1.0
    assert metrics[3].clip_scale == pytest.approx(50 / metrics[3].grad_norm)
    assert metrics[3].escapes > metrics[2].escapes
    num_params = sum(b.size for b in ours.layout.updated_by_host)
    assert 3 * num_params <= metrics[2].record_bytes <= 3.1 * num_params
    assert metrics[2].speculation == "the plan says so"
    spans = ours.timeline().steps(2, 2).spans
    notes = {s.name.split()[0]: s.note for s in spans if s.lane == "host"}
    assert notes == {
      "host_scalars": "",
      "host_update": "ahead: the plan says so",
      "host_settle": "committed",
    }


def test_a_plan_that_waits_says_so():
  for plan in ({}, {"speculation": "record3", "speculate": "never"}):
    with trainer(plan) as ours:
      metrics = ours.step(batches(1)[0])
      assert metrics.speculated == metrics.record_bytes == 0
      assert metrics.speculation == "waits: the plan says so"
      kinds = {task.kind for task in ours.graph.tasks}
      assert TaskKind.HOST_SETTLE not in kinds


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_account_has_the_bytes_of_the_records(scheme):
  bytes_per_param = {"record2": 2, "record3": 3, "pingpong": 12}[scheme]
  with trainer({"speculation": scheme, "max_record_bytes": 10**9}) as ours:
    buckets = ours.layout.updated_by_host
    sizes = [record_bytes(b, ours.plan, 1).total for b in buckets]
    whole = sum(sizes)
    assert ours.account.host["records"] == whole
    params = sum(bucket.size for bucket in buckets)
    escapes = 0 if scheme == "pingpong" else 0.5
    assert whole == pytest.approx(
      (bytes_per_param + escapes) * params, rel=0.02
    )
  limit = sizes[0] + sizes[1]
  with trainer({"speculation": scheme, "max_record_bytes": limit}) as ours:
    assert ours.account.host["records"] == limit
    settles = [t for t in ours.graph.tasks if t.kind is TaskKind.HOST_SETTLE]
    assert {task.bucket for task in settles} == {0, 1}


def test_fp16_takes_overflows_back_and_halves_its_scale(monkeypatch):
  scale = LossScale(initial=2.0**24, growth_interval=5)
  data = batches(40)
  plan = {"speculation": "record2", "speculate": "always"}
  changes = {"precision": "fp16", "loss_scale": scale, "clip_norm": 1.7}
  theirs = run(trainer({}, **changes), data)
  ours = trainer(plan, **changes)
  let_all_run_ahead(ours, monkeypatch)
  ours = run(ours, data)
  assert_same_run(ours, theirs)
  assert sum(m.undone > 0 for m in ours[1]) == sum(m.skipped for m in ours[1])
  assert sum(m.undone > 0 for m in ours[1]) > 4
  assert sum(m.committed > 0 for m in ours[1]) > 4


def test_a_checkpoint_of_a_speculating_run_resumes_in_any_plan(tmp_path):
  data = spiking_batches(12, infinite=(3, 8), spikes=(5, 9))
  plan = {"speculation": "record3", "speculate": "always"}
  changes = {"precision": "bf16", "clip_norm": 1.7}
  whole = run(trainer({}, **changes), data)
  with trainer(plan, **changes) as ours:
    for batch in data[:6]:
      ours.step(batch)
    ours.save(tmp_path)
  flowing = {"speculation": "pingpong", "weights": "flow"}
  for another in (plan, {}, flowing):
    with trainer(another, **changes) as ours:
      ours.restore(tmp_path)
      for batch in data[6:]:
        ours.step(batch)
      assert_same_bits(state_of(ours), whole[2])
