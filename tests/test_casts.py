"""Casts of the host in passes of their own. Oracle: those of one pass."""

import functools

import numpy as np
import pytest
from flax import nnx

import sojax
from sojax.host.arena import Arena
from sojax.host.casts import make_wide_gradients
from sojax.host.kernels import Pool
from sojax.host.operations import AdamwStep, Narrow, Widen
from sojax.plan.casts import SeparateCasts
from tests.speculating import spiking_batches, spiking_loss, trainer
from tests.test_speculation_model import layout_of
from tests.training import (
  ROWS,
  assert_same_bits,
  batches,
  config,
  mesh_of,
  optimizer,
  small_gpt,
  state_of,
)

GRADS = {"grad_cast": "host_separate"}
WEIGHTS = {"weight_cast": "host_separate"}
BOTH = GRADS | WEIGHTS
INFINITE, SPIKES = (2,), (3, 5)
WORKING = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def run(plan, *, rows=4, **changes):
  """Returns losses, norms and state after steps of which some are clipped."""
  data = spiking_batches(7, infinite=INFINITE, spikes=SPIKES, rows=rows)
  with trainer(plan, clip_norm=1.7, **changes) as ours:
    metrics = [ours.step(batch) for batch in data]
    assert {m.step for m in metrics if m.skipped} >= {*INFINITE}
    assert 0 < sum(m.clipped for m in metrics) < len(metrics) - 2
    return {
      "loss": np.array([m.loss for m in metrics]),
      "grad_norm": np.array([m.grad_norm for m in metrics]),
      "evaluated": np.array(ours.evaluate(data[0])),
      **state_of(ours),
    }


@pytest.mark.parametrize("precision", WORKING)
@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_passes_of_their_own_do_not_change_a_bit(weights, precision):
  plan = {"weights": weights}
  ours = run(plan | BOTH, precision=precision)
  assert_same_bits(ours, run(plan, precision=precision))


@functools.cache
def straight():
  """The run of the plan that has no switch set."""
  return run({}, precision="bf16")


@pytest.mark.parametrize(
  ("casts", "plan"),
  [
    (GRADS, {}),
    (WEIGHTS, {}),
    (BOTH, {"device_buckets": 3}),
    (BOTH, {"park": "device", "ring_slots": 1}),
    (GRADS, {"weight_cast": "device"}),
    (GRADS, {"master": "split"}),
    (WEIGHTS, {"grad_cast": "device", "accumulate": "host"}),
  ],
  ids=str,
)
def test_they_go_with_other_switches(casts, plan):
  expected = run(plan, precision="bf16") if plan else straight()
  assert_same_bits(run(plan | casts, precision="bf16"), expected)


@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_two_ranks_and_two_micro_batches_have_the_same_bits(weights):
  states = [
    run(
      {"weights": weights} | casts,
      rows=2 * ROWS,
      mesh=mesh_of(2),
      micro_batch=ROWS // 2,
      accumulation=2,
      precision="bf16",
    )
    for casts in ({}, BOTH)
  ]
  assert_same_bits(*states)


def test_what_is_not_trained_needs_no_room_for_gradients():
  """On two ranks, whose largest bucket of all is not trained."""
  states = []
  for casts in ({}, BOTH):
    with sojax.Trainer(
      small_gpt(vocab_size=2048),
      optimizer(),
      config(precision="bf16", micro_batch=2),
      casts,
      mesh_of(2),
      trainable=nnx.PathContains("mlp"),
      loss=spiking_loss,
    ) as ours:
      for batch in batches(3):
        ours.step(batch)
      states.append(state_of(ours))
      largest = max(ours.layout.buckets, key=lambda bucket: bucket.size)
      assert not largest.trained
  assert_same_bits(*states)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("widen", [True, False])
def test_the_largest_bucket_has_room_and_no_more(widen, num_shards):
  layout = layout_of(num_shards)
  arenas = []

  def make_arena(capacity_bytes):
    arenas.append(Arena(capacity_bytes))
    return arenas[-1]

  casts = SeparateCasts(widen=widen, narrow=True)
  wide = make_wide_gradients(layout, casts, make_arena)
  largest = max(bucket.size for bucket in layout.buckets) if widen else 0
  assert wide.size == largest
  expected = [4 * largest] if widen else []
  assert [arena.capacity_bytes for arena in arenas] == expected


def operations_of_a_step(ours, monkeypatch):
  """Returns what the pool is asked to do in one step."""
  seen = []
  submit = Pool.submit

  def watching(pool, operation):
    seen.append(operation)
    return submit(pool, operation)

  monkeypatch.setattr(Pool, "submit", watching)
  ours.step(batches(1)[0])
  ours.drain()
  monkeypatch.undo()
  return seen


FROM_AND_TO = {
  Widen: ("grad", "sum_inout"),
  AdamwStep: ("grad", "weight_out"),
  Narrow: ("p", "weight_out"),
}


def name_of(operation):
  """Returns an operation's type, and the dtypes that it casts from and to."""
  dtypes = [
    {str(array if array is None else array.dtype) for array in arrays}
    for field in FROM_AND_TO[type(operation)]
    for arrays in ([getattr(x, field) for x in operation.segments],)
  ]
  return type(operation), *(dtype for (dtype,) in dtypes)


@pytest.mark.parametrize("precision", WORKING)
@pytest.mark.parametrize("casts", [{}, GRADS, WEIGHTS, BOTH], ids=str)
def test_each_bucket_is_cast_before_and_after_its_update(
  casts, precision, monkeypatch
):
  """In float32 there is nothing to cast; otherwise one memory is widened to,
  as large as the largest bucket."""
  with trainer(casts, precision=precision) as ours:
    operations = operations_of_a_step(ours, monkeypatch)
    sizes = [bucket.size for bucket in ours.layout.updated_by_host]
    wide_bytes = ours.account.host["wide_gradients"]
  working = WORKING[precision]
  widens, narrows = (
    name in casts and precision != "fp32"
    for name in ("grad_cast", "weight_cast")
  )
  step = AdamwStep, working, working
  if narrows:
    step = AdamwStep, step[1], "None"
  if widens:
    step = AdamwStep, "float32", step[2]
  passes = [(Widen, working, "float32")] * widens + [step]
  passes += [(Narrow, "float32", working)] * narrows
  assert len(sizes) > 2
  assert [*map(name_of, operations)] == passes * len(sizes)
  assert wide_bytes == (4 * max(sizes) if widens else 0)
  if widens:
    starts = {
      operation.segments[0].sum_inout.ctypes.data
      for operation in operations
      if isinstance(operation, Widen)
    }
    assert len(starts) == 1
