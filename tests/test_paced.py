"""The paced runtime. Oracles: hand-worked times; the reference AdamW, in bits.

Times are planned ones, or causes: nothing is asserted about how late threads
wake up.
"""

import gc
import threading
import weakref

import numpy as np
import pytest

from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.graph.schedule import schedule
from sojax.host.speculation import RecordingBucket
from sojax.plan.adamw import adam_scalars
from sojax.plan.buckets import plan_buckets
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Cost
from sojax.plan.plan import Plan, WireDtypes
from sojax.reference.accumulate import accumulate_float32
from sojax.reference.adamw import adamw_float32, round_to_bfloat16
from sojax.runtime import pace as pace_module
from sojax.runtime.pace import Pace
from sojax.runtime.paced import COMMIT, PacedTrainer
from sojax.runtime.run import StepError
from sojax.runtime.step import HostVerdict
from tests.speculating import let_all_run_ahead
from tests.test_buckets import model_shape

K = TaskKind
SECONDS = {Lane.DEVICE: 4e-3, Lane.D2H: 1e-3, Lane.H2D: 1e-3, Lane.HOST: 0.0}
MODEL = model_shape(
  [(0, (60, 500), 0), (1, (50, 301), 0), (1, (77,), 1), (2, (40, 1024), 0)]
)
CLIP = HostVerdict(grad_scale=0.25, finite=True, norm=4.0, loss_scale=1.0)
SKIP = HostVerdict(grad_scale=0.0, finite=False, norm=np.inf, loss_scale=1.0)
PLANS = {
  "wait": {},
  "callback": {"gradients_out": "callback"},
  "record3": {"speculation": "record3"},
  "record2": {"speculation": "record2"},
  "little_room": {"speculation": "record2", "escape_bytes_per_param": 0.01},
  "pingpong": {"speculation": "pingpong"},
  "split": {"master": "split", "speculation": "record3"},
  "flow": {"weights": "flow", "speculation": "record3"},
  "mix": {
    "weights": ("stationary", "flow", "flow_once"),
    "speculation": "record3",
  },
  "device_bucket": {"device_buckets": 1, "speculation": "record3"},
  "host_sums": {"accumulate": "host", "speculation": "record3"},
  "parked": {"park": "device"},
  "offload": {"activations": "offload"},
  "separate": {"grad_cast": "host_separate", "weight_cast": "host_separate"},
  "wide": {"grad_cast": "device", "weight_cast": "device"},
}


def paced(plan=None, *, seconds=SECONDS, accumulation=1, **arguments):
  """A paced trainer of a small model of three stages."""
  plan = Plan(
    **({"bucket_bytes": 1 << 16, "speculate": "always"} | (plan or {}))
  )
  config = TrainConfig(
    micro_batch=1, seq_len=8, precision="bf16", accumulation=accumulation
  )
  layout = plan_buckets(
    MODEL,
    bucket_bytes=plan.bucket_bytes,
    elem_bytes=WireDtypes.of(plan, config).grad_bytes,
    device_buckets=plan.device_buckets,
  )
  graph = schedule(layout, plan, config, [64] * 3)
  costs = [Cost(seconds[task.lane]) for task in graph.tasks]
  return PacedTrainer(layout, plan, config, graph, costs, **arguments)


def state_of(host):
  """Copies a bucket's state: masters, mu and nu."""
  return [
    np.concatenate(
      [host.read(kind, i, 0, u.size) for i, u in enumerate(host.bucket.units)]
    )
    for kind in ("master", "mu", "nu")
  ]


def stepped(ours, before, verdicts, accumulation):
  """What masters and moments become, by the reference."""
  after = {}
  for index, state in before.items():
    grad = one = np.concatenate([x for xs in ours.gradients[index] for x in xs])
    for _ in range(accumulation - 1):
      grad = accumulate_float32(np.asarray(grad, np.float32), one)
    group = ours.layout.model.groups[ours.layout.buckets[index].group]
    count = 0
    for verdict in verdicts:
      if verdict.finite:
        scalars = adam_scalars(group, count)
        state = adamw_float32(*state, grad, scalars, verdict.grad_scale)
        count += 1
    after[index] = state
  return after


@pytest.mark.parametrize(
  ("plan", "summed"),
  [
    ({}, False),  # backwards do
    ({"accumulate": "host"}, False),  # its sums do
    ({"gradients_out": "callback"}, True),
  ],
)
def test_updates_sum_squares_only_where_nobody_has_before(
  plan, summed, monkeypatch
):
  speculate, asked = RecordingBucket.speculate, []

  def spy(*args, sum_squares=False):
    asked.append(sum_squares)
    return speculate(*args, sum_squares=sum_squares)

  monkeypatch.setattr(RecordingBucket, "speculate", spy)
  with paced({"speculation": "record3", **plan}, accumulation=2) as ours:
    let_all_run_ahead(ours, monkeypatch)
    ours.step()
    ours.drain()
    assert asked == len(ours.host_buckets) * [summed]


@pytest.mark.parametrize("name", PLANS)
def test_the_state_is_that_of_the_updates_that_count(name, monkeypatch):
  verdicts = [COMMIT, CLIP, SKIP, COMMIT, SKIP, CLIP, COMMIT]
  accumulation = 3 if name == "host_sums" else 1
  with paced(
    PLANS[name], accumulation=accumulation, verdicts=verdicts.__getitem__
  ) as ours:
    if "speculation" in PLANS[name]:
      let_all_run_ahead(ours, monkeypatch)
    before = {index: state_of(x) for index, x in ours.host_buckets.items()}
    for _ in verdicts:
      ours.step()
    ours.drain()
    assert ours.count == 5 and ours.num_steps == 7
    assert all(np.std(masters) > 0.01 for masters, _, _ in before.values())
    expected = stepped(ours, before, verdicts, accumulation)
    assert expected
    for index, state in expected.items():
      for ours_is, reference in zip(
        state_of(ours.host_buckets[index]), state, strict=True
      ):
        np.testing.assert_array_equal(
          ours_is.view(np.uint32), reference.view(np.uint32)
        )


def test_updates_run_ahead_and_become_what_the_verdict_says(monkeypatch):
  verdicts = [COMMIT, CLIP, SKIP]
  with paced(PLANS["record3"], verdicts=verdicts.__getitem__) as ours:
    let_all_run_ahead(ours, monkeypatch)
    for _ in verdicts:
      ours.step()
    ours.drain()
    spans = ours.stamped_timeline().spans
    num_buckets = len(ours.layout.buckets)
  for step, outcome in enumerate(["committed", "redone", "undone"]):
    of_step = [span for span in spans if span.step == step]
    (validate,) = (s for s in of_step if s.name.startswith("validate"))
    updates = [s for s in of_step if s.name.startswith("host_update")]
    settles = [s for s in of_step if s.name.startswith("host_settle")]
    assert len(updates) == len(settles) == num_buckets
    assert all(s.note.startswith("ahead") for s in updates)
    assert all(s.end_s <= validate.end_s for s in updates)
    assert all(s.note == outcome for s in settles)


def test_gradients_are_noise_that_is_not_clipped():
  with paced() as ours:
    values = np.concatenate(
      [x for units in ours.gradients.values() for xs in units for x in xs]
    ).astype(np.float64)
  assert np.linalg.norm(values) == pytest.approx(1e-2, rel=0.02)
  assert abs(np.mean(values)) < 0.02 * np.std(values)


def test_an_update_runs_while_the_device_computes():
  """The last stages' updates take no time; backward of the first takes long."""
  with paced(PLANS["record3"], seconds=SECONDS | {Lane.DEVICE: 0.1}) as ours:
    ours.step()
    ours.drain()
    spans = ours.timeline().spans
  first = next(s for s in spans if s.name.startswith("host_update"))
  last = [s for s in spans if s.name.startswith("backward")][-1]
  assert first.end_s < last.end_s


def test_a_spike_and_an_infinity_in_the_gradients_end_running_ahead():
  with paced(PLANS["host_sums"], accumulation=2) as ours:
    bucket = ours.layout.updated_by_host[0].index
    for value in (1e3, np.inf):
      ours.gradients[bucket][0][0][7] = value
      ours.step()
      ours.drain()
    notes = [
      span.note
      for span in ours.timeline().spans
      if span.name.startswith("host_update")
    ]
  num_buckets = len(notes) // 2
  assert set(notes[:num_buckets]) <= {
    "waits: the norm is past the clip norm",
    "",
  }
  assert "waits: the norm is past the clip norm" in notes[:num_buckets]
  assert "waits: a gradient is not finite" in notes[num_buckets:]


@pytest.mark.parametrize("name", PLANS)
def test_emulated_tasks_take_their_time_after_what_they_wait_for(name):
  accumulation = 2 if name == "host_sums" else 1
  with paced(PLANS[name], accumulation=accumulation) as ours:
    for _ in range(3):
      ours.step()
    ours.drain()
    spans = {(s.step, s.task): s for s in ours.timeline().spans}
    stamped = {(s.step, s.task): s for s in ours.stamped_timeline().spans}
  assert len(spans) == 3 * len(ours.graph.tasks)
  lane_ends_s = dict.fromkeys(Lane, 0.0)
  resent = {
    task.index for task in ours.graph.tasks if task.kind is K.WEIGHT_RESEND
  }
  for (step, index), span in sorted(spans.items()):
    task = ours.graph.tasks[index]
    if task.lane is Lane.HOST or index in resent:
      continue
    assert span.end_s - span.start_s == pytest.approx(SECONDS[task.lane])
    assert span.end_s <= stamped[step, index].end_s
    for when, dep in [
      *((step, dep) for dep in task.deps),
      *((step - 1, dep) for dep in task.prev_deps if step),
    ]:
      if dep not in resent:
        assert span.start_s >= spans[when, dep].end_s
    if task.lane is Lane.DEVICE:
      assert span.start_s >= lane_ends_s[task.lane]
      lane_ends_s[task.lane] = span.end_s


def test_a_ring_buffer_is_free_when_its_transfer_ends():
  with paced({"ring_slots": 1}, seconds=SECONDS | {Lane.H2D: 0.05}) as ours:
    ours.step()
    ours.drain()
    spans = ours.timeline().spans
    buckets = ours.layout.buckets
  updates = {s.task: s for s in spans if s.name.startswith("host_update")}
  transfers = {s.task: s for s in spans if s.name.startswith("weight_in")}
  shapes = {}
  for index in sorted(updates):
    bucket = ours.graph.tasks[index].bucket
    (transfer,) = (
      t for i, t in transfers.items() if ours.graph.tasks[i].bucket == bucket
    )
    for unit in buckets[bucket].units:
      if unit.shape in shapes:
        assert updates[index].end_s >= shapes[unit.shape].end_s
      shapes[unit.shape] = transfer
  assert len(shapes) < sum(len(bucket.units) for bucket in buckets)


@pytest.mark.parametrize(
  "kind", [K.FORWARD, K.GRAD_OUT, K.VALIDATE, K.HOST_UPDATE, K.WEIGHT_IN]
)
@pytest.mark.parametrize("at_its_end", [False, True])
def test_a_failing_action_stops_the_steps(kind, at_its_end):
  def broken():
    raise RuntimeError("broken on purpose")

  ours = paced()
  actions = ours._executor._actions
  action = actions[kind]

  def failing(task, step):
    if step.number == 1 and not at_its_end:
      broken()
    wait = action(task, step)
    if step.number != 1:
      return wait
    return broken if wait else broken()

  actions[kind] = failing
  before = {index: state_of(x) for index, x in ours.host_buckets.items()}
  with pytest.raises(StepError) as caught:
    for _ in range(4):
      ours.step()
    ours.drain()
  assert caught.value.step == 1
  assert str(caught.value.__cause__) == "broken on purpose"
  assert caught.value.intact == (kind in (K.FORWARD, K.GRAD_OUT, K.VALIDATE))
  with pytest.raises(StepError):
    ours.step()
  if caught.value.intact:
    for index, state in stepped(ours, before, [COMMIT], 1).items():
      for a, b in zip(state_of(ours.host_buckets[index]), state, strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
  ours.close()


@pytest.mark.parametrize("name", ["wait", "host_sums"])
def test_its_memory_is_free_without_a_garbage_collection(name):
  gc.disable()
  try:
    with paced(PLANS[name]) as trainer:
      trainer.step()
    bucket = trainer.host_buckets[0]
    alive = weakref.ref(trainer), weakref.ref(bucket)
    del trainer, bucket
    assert [reference() for reference in alive] == [None, None]
  finally:
    gc.enable()


def test_close_ends_all_threads():
  before = set(threading.enumerate())
  ours = paced()
  ours.step()
  assert set(threading.enumerate()) > before
  ours.close()
  ours.close()
  assert set(threading.enumerate()) <= before
  with pytest.raises(ValueError, match="closed"):
    ours.pool.zero([np.ones(1)])
  with pytest.raises(RuntimeError, match="closed"):
    ours.step()


@pytest.mark.parametrize("name", ["flow", "mix"])
def test_weights_that_flow_are_rounded_masters(name):
  with paced(PLANS[name]) as ours:
    ours.step()
    ours.drain()
    assert ours.weights.copied
    for index, shards in ours.weights.copied.items():
      masters, _, _ = state_of(ours.host_buckets[index])
      copied = np.concatenate([x for xs in shards for x in xs])
      np.testing.assert_array_equal(
        copied.view(np.uint16), round_to_bfloat16(masters).view(np.uint16)
      )


def test_times_are_planned_from_lanes_and_what_is_consumed(monkeypatch):
  """Times in milliseconds, worked by hand; the clock stands where it is put."""
  tasks = [
    Task(index=0, kind=K.BACKWARD, lane=Lane.DEVICE, prev_deps=(3,)),
    Task(index=1, kind=K.GRAD_OUT, lane=Lane.D2H, deps=(0,)),
    Task(index=2, kind=K.BACKWARD, lane=Lane.DEVICE),
    Task(index=3, kind=K.WEIGHT_IN, lane=Lane.H2D),
  ]
  graph = StepGraph(tuple(tasks))
  pace = Pace(graph, [Cost(s) for s in (10.0, 4.0, 7.0, 30.0)], num_steps=2)
  now = [100.0]
  monkeypatch.setattr(pace_module.time, "perf_counter", lambda: now[0])
  assert pace.begin(tasks[0], 0) == 110.0
  assert pace.begin(tasks[1], 0) == 114.0
  now[0] = 105.0  # the device is busy until 110
  assert pace.begin(tasks[2], 0) == 117.0
  now[0] = 120.0  # late: it begins now
  assert pace.begin(tasks[3], 0) == 150.0
  assert pace.planned(0) == {
    0: (100.0, 110.0),
    1: (110.0, 114.0),
    2: (110.0, 117.0),
    3: (120.0, 150.0),
  }
  now[0] = 121.0  # the weights of step 0 are still on their way
  assert pace.begin(tasks[0], 1) == 160.0
  pace.begin(tasks[0], 2)
  assert pace.planned(0) == {}, "more is kept than was asked for"
  assert pace.planned(1) == {0: (150.0, 160.0)}


@pytest.mark.parametrize(
  ("lane", "seconds", "match"),
  [
    (Lane.DEVICE, [1.0, 1.0], "2 costs for 1 tasks"),
    (Lane.DEVICE, [-1.0], "takes -1.0 s"),
    (Lane.DEVICE, [float("nan")], "takes nan s"),
    (Lane.NETWORK, [1.0], "only simulated"),
  ],
)
def test_costs_that_do_not_fit_are_refused(lane, seconds, match):
  graph = StepGraph((Task(index=0, kind=K.FORWARD, lane=lane),))
  with pytest.raises(ValueError, match=match):
    Pace(graph, [Cost(s) for s in seconds], num_steps=2)


@pytest.mark.parametrize("name", ["wait", "record3"])
def test_a_host_slower_than_backward_is_reported_as_exposed(name):
  """Device and links take next to nothing: what they hide is less."""
  seconds = dict.fromkeys(SECONDS, 1e-6)
  with paced(PLANS[name], seconds=seconds) as ours:
    for _ in range(3):
      ours.step()
    ours.drain()
    recorded = ours.timeline()
  host_s, device_s = recorded.busy_s("host"), recorded.busy_s("device")
  assert host_s > device_s
  assert recorded.exposed_host_s() >= host_s - device_s > 0
  shown = float(recorded.table().split("exposed host time: ")[1].split(" s")[0])
  assert shown == pytest.approx(recorded.exposed_host_s(), abs=1e-4)
