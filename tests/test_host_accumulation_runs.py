"""Runs that add up on the host: failures, skips, threads and memory."""

import collections
import threading
import weakref

import numpy as np
import pytest

import sojax
from sojax.graph.graph import Lane, TaskKind
from sojax.plan.config import LossScale
from tests.test_loss_scale import rule
from tests.test_one_stage import Plain
from tests.test_trainer_failures import Broken, PoisonedGPT
from tests.training import (
  assert_same_bits,
  batches,
  small_gpt,
  state_of,
  trainer,
)

K = TaskKind
HOST = {"accumulate": "host"}


def start(plan=HOST, *, model=small_gpt, accumulation=3, **changes):
  changes |= {"micro_batch": 2, "accumulation": accumulation}
  return trainer(plan, model=model(), **changes)


def data_for(ours, num_steps):
  return batches(num_steps, rows=2 * ours.config.accumulation)


# Failures.


def break_micro_batch(ours, kind, micro, *, half_way=False):
  """Makes the next task of a kind and micro-batch fail when it is issued.

  Half-way: after it has done its work.
  """
  actions = ours._executor._actions
  action = actions[kind]

  def fail(task, step):
    if task.micro != micro:
      return action(task, step)
    actions[kind] = action
    if half_way:
      action(task, step)
    raise Broken(task.name)

  actions[kind] = fail


@pytest.mark.parametrize(
  ("kind", "micro", "half_way"),
  [
    (K.HOST_ACCUMULATE, 0, False),
    (K.HOST_ACCUMULATE, 1, True),
    (K.HOST_ACCUMULATE, 2, True),
    (K.BACKWARD, 1, False),
    (K.BACKWARD, 2, False),
    (K.GRAD_OUT, 1, False),
  ],
)
@pytest.mark.parametrize(
  ("plan", "model"),
  [
    ({}, small_gpt),
    ({"weights": "flow", "bucket_bytes": 1 << 16}, small_gpt),
    ({}, Plain),
  ],
  ids=["stationary", "flow", "one stage"],
)
def test_a_failure_while_micro_batches_are_added_up_loses_nothing(
  kind, micro, half_way, plan, model
):
  plan = HOST | plan
  with start(plan, model=model) as ours, start(plan, model=model) as theirs:
    data = data_for(ours, 4)
    for batch in data[:2]:
      ours.step(batch)
    break_micro_batch(ours, kind, micro, half_way=half_way)
    with pytest.raises(sojax.StepError, match="step 2 failed") as caught:
      ours.step(data[2])
    assert caught.value.intact
    assert isinstance(caught.value.__cause__, Broken)
    step = caught.value.data
    assert not (step.micro_grads or step.host_grads or step.partial)
    for batch in data[2:]:
      ours.step(batch)
    for batch in data:
      theirs.step(batch)
    assert_same_bits(state_of(ours), state_of(theirs))


def test_an_interrupt_while_the_caller_waits_for_sums_loses_nothing():
  with start() as ours, start() as theirs:
    data = data_for(ours, 3)
    ours.step(data[0])
    actions = ours._executor._actions
    backward = actions[K.BACKWARD]

    def interrupted(task, step):
      if task.micro == 1:
        actions[K.BACKWARD] = backward
        raise KeyboardInterrupt
      return backward(task, step)

    actions[K.BACKWARD] = interrupted
    with pytest.raises(KeyboardInterrupt):
      ours.step(data[1])
    with pytest.raises(sojax.StepError) as caught:
      ours.drain()
    assert caught.value.intact
    for batch in data[1:]:
      ours.step(batch)
    for batch in data:
      theirs.step(batch)
    assert_same_bits(state_of(ours), state_of(theirs))


# Skips.


@pytest.mark.parametrize("micro", [0, 1, 2])
@pytest.mark.parametrize("plan", [{}, {"device_buckets": 1}], ids=str)
def test_one_inf_in_any_micro_batch_skips_the_step(micro, plan):
  """The Inf is embed's; with a device bucket the device adds it up."""
  with (
    start(HOST | plan, model=PoisonedGPT) as ours,
    start(HOST | plan, model=PoisonedGPT) as never_saw,
  ):
    data = data_for(ours, 3)
    for batch in data:
      batch["tokens"] %= 255
    bad = {"tokens": data[0]["tokens"].copy()}
    bad["tokens"][2 * micro, 3] = 255
    ours.step(data[0])
    metrics = ours.step(bad)
    assert metrics.skipped
    assert not np.isfinite(metrics.grad_norm)
    for batch in data[1:]:
      assert not ours.step(batch).skipped
    for batch in data:
      never_saw.step(batch)
    ours_, theirs = state_of(ours), state_of(never_saw)
    assert ours_.pop("num_steps") == theirs.pop("num_steps") + 1
    assert_same_bits(ours_, theirs)


@pytest.mark.parametrize(
  "plan", [{}, {"device_buckets": 2, "bucket_bytes": 1 << 16}], ids=str
)
def test_overflows_of_fp16_are_skipped_by_the_rule(plan):
  """The scale's history is the rule's; what is skipped changes nothing."""
  scale = LossScale(initial=2.0**24, growth_interval=4)
  changes = {"precision": "fp16", "loss_scale": scale, "accumulation": 2}
  with start(HOST | plan, **changes) as ours:
    history, scales = [], []
    before = state_of(ours)
    for batch in data_for(ours, 30):
      metrics = ours.step(batch)
      history.append(not metrics.skipped)
      scales.append(metrics.loss_scale)
      after = state_of(ours)
      for name, array in after.items():
        if name.endswith(("master", "mu", "nu", " count")):
          same = array.tobytes() == before[name].tobytes()
          assert same or not metrics.skipped, name
      before = after
  assert 4 < history.count(False) < 20
  assert scales == rule(history, scale)


# Threads.


@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_the_caller_dispatches_every_program_and_the_host_thread_adds(weights):
  """Though the caller waits for the host before it may dispatch."""
  seen = {}
  with start(HOST | {"weights": weights}) as ours:
    for kind, action in list(ours._executor._actions.items()):

      def noting(task, step, action=action):
        threads = seen.setdefault(task.kind, set())
        threads.add(threading.current_thread().name)
        return action(task, step)

      ours._executor._actions[kind] = noting
    for batch in data_for(ours, 2):
      ours.step(batch)
    ours.drain()
  caller = threading.current_thread().name
  on_host = {K.HOST_SCALARS, K.HOST_ACCUMULATE, K.HOST_UPDATE}
  if weights == "stationary":
    on_host.add(K.WEIGHT_IN)
  for kind, threads in seen.items():
    assert threads == {"sojax-host" if kind in on_host else caller}, kind
  assert on_host < set(seen)


def test_the_timeline_has_every_sum():
  with start() as ours:
    (batch,) = data_for(ours, 1)
    assert ours.step(batch).exposed_host_s >= 0.0
    names = [span.name for span in ours.timeline().spans]
    assert len(set(names)) == len(names) == len(ours.graph.tasks)
    summed = [name for name in names if name.startswith("host_accumulate")]
    assert len(summed) == 3 * len(ours.layout.buckets)


# Memory.


@pytest.mark.parametrize("model", [small_gpt, Plain])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_host_holds_as_many_gradients_as_the_account_says(model, precision):
  """Each from its transfer's start until it has been added, and then no more:
  nothing else keeps the memory."""
  with start(model=model, accumulation=6, precision=precision) as ours:
    grad_bytes = {"fp32": 4, "bf16": 2}[precision]
    sizes = [grad_bytes * bucket.size for bucket in ours.layout.buckets]
    held, most, freed = collections.Counter(), [], []
    counting = threading.Lock()
    actions = ours._executor._actions
    grad_out, accumulate = actions[K.GRAD_OUT], actions[K.HOST_ACCUMULATE]

    def counting_out(task, step):
      with counting:
        held[task.bucket] += 1
        most.append(sum(n * sizes[bucket] for bucket, n in held.items()))
      return grad_out(task, step)

    def counting_added(task, step):
      units = step.micro_grads[task.bucket, task.micro]
      grads = [shard for shards in units for shard in shards]
      del units
      assert sum(grad.nbytes for grad in grads) == sizes[task.bucket]
      views = [weakref.ref(grad) for grad in grads]
      del grads
      accumulate(task, step)
      with counting:
        freed.append(all(view() is None for view in views))
        held[task.bucket] -= 1

    actions[K.GRAD_OUT] = counting_out
    actions[K.HOST_ACCUMULATE] = counting_added
    for batch in data_for(ours, 2):
      ours.step(batch)
    ours.drain()
    assert len(freed) == 12 * len(sizes) and all(freed)
    assert 0 < max(most) <= ours.account.host["gradients"]
    num_grads = 2 if model is Plain else 1
    assert ours.account.host["gradients"] == num_grads * sum(sizes)


def test_the_device_holds_no_sums_of_host_buckets():
  with start(accumulation=2) as ours:
    partial = []
    for kind in (K.FORWARD, K.BACKWARD):
      action = ours._executor._actions[kind]

      def noting(task, step, action=action):
        wait = action(task, step)
        partial.extend(x for sums in step.partial.values() for x in sums)
        return wait

      ours._executor._actions[kind] = noting
    (batch,) = data_for(ours, 1)
    ours.step(batch)
    ours.drain()
  assert partial == []
  assert {t.lane for t in ours.graph.tasks if t.kind is K.HOST_ACCUMULATE} == {
    Lane.HOST
  }
