"""Pinned buffers: the ring, and that nothing is overwritten too early."""

import ctypes
import threading

import ml_dtypes
import numpy as np
import pytest

from sojax.cluster.mesh import Placement
from sojax.graph.graph import TaskKind
from sojax.host.adam import write_weights
from sojax.host.wire import WireBuffer, WireRing
from tests.training import assert_same_bits, batches, state_of, trainer

PLACEMENT = Placement.of(None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 7)])
def test_a_buffer_is_written_through_its_view(shape, dtype):
  buffer = WireBuffer(shape, dtype, PLACEMENT)
  assert buffer.array.sharding.memory_kind == "pinned_host"
  size = max(1, int(np.prod(shape)))
  values = np.arange(size).astype(buffer.array.dtype)
  buffer.shards_inout[0][:] = values
  np.testing.assert_array_equal(np.asarray(buffer.array).reshape(-1), values)


def test_take_waits_until_a_buffer_of_the_shape_is_given_back():
  ring = WireRing({(4,): 1, (2,): 1}, dtype="float32", placement=PLACEMENT)
  first = ring.take((4,))
  ring.take((2,))  # another shape does not wait
  taken = []
  waiter = threading.Thread(target=lambda: taken.append(ring.take((4,))))
  waiter.start()
  assert not taken
  ring.give_back([first])
  waiter.join(60)
  assert taken == [first]


def test_reset_frees_what_was_never_given_back():
  ring = WireRing({(4,): 2}, dtype="float32", placement=PLACEMENT)
  lost = {id(ring.take((4,))), id(ring.take((4,)))}
  ring.reset()
  assert {id(ring.take((4,))), id(ring.take((4,)))} == lost


def scribble(array):
  """Overwrites memory, read-only views of it included."""
  ctypes.memset(array.ctypes.data, 0xFF, array.nbytes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
  "plan",
  [
    {"bucket_bytes": 1 << 16, "ring_slots": 1},
    {"bucket_bytes": 1 << 16, "ring_slots": 3, "device_buckets": 1},
    {"weights": "flow", "bucket_bytes": 1 << 16},
  ],
  ids=str,
)
def test_every_host_buffer_may_be_overwritten_as_soon_as_it_is_free(
  plan, precision
):
  """0xFF bytes are NaN: whoever still read them would spread it."""
  data = batches(5)
  with trainer(plan, precision=precision) as theirs:
    for batch in data:
      theirs.step(batch)
    expected = state_of(theirs)
  with trainer(plan, precision=precision) as ours:
    actions = ours._executor._actions
    host_update = actions[TaskKind.HOST_UPDATE]

    def scribbling(task, step):
      grads = step.host_grads[task.bucket]
      if plan.get("weights") == "flow":
        bucket = ours.layout.buckets[task.bucket]
        for buffer in ours._parts.weights.buffers(bucket):
          scribble(buffer.shards_inout[0])
      host_update(task, step)
      for (grad,) in grads:
        scribble(grad)

    actions[TaskKind.HOST_UPDATE] = scribbling
    if plan.get("weights") != "flow":
      ring = ours._parts.weights._ring
      give_back = ring.give_back

      def scribbling_back(buffers):
        for buffer in buffers:
          scribble(buffer.shards_inout[0])
        give_back(buffers)

      ring.give_back = scribbling_back
    for batch in data:
      ours.step(batch)
      scribble(batch["tokens"])
    assert_same_bits(state_of(ours), expected)


def test_write_weights_rounds_to_the_nearest_with_ties_away_from_zero():
  """Oracle: distances in float64 to the two bfloat16 neighbours."""
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
  bits[:1000] = (bits[:1000] & 0xFFFF0000) | 0x8000  # ties
  master = bits.view(np.float32)
  out = np.empty(master.shape, ml_dtypes.bfloat16)
  write_weights(master, out)
  nan = np.isnan(master)
  assert np.all(out[nan].view(np.uint16) == 0x7FC0)
  finite = np.abs(master) < 3.3e38
  value, low = master[finite].astype(np.float64), bits[finite] >> 16
  below = (low << 16).view(np.float32).astype(np.float64)
  above = ((low + 1) << 16).view(np.float32).astype(np.float64)
  nearest = np.where(
    np.abs(above - value) <= np.abs(value - below), low + 1, low
  )
  assert np.all(out[finite].view(np.uint16) == nearest)
  assert np.all(np.isinf(out[np.isinf(master)].astype(np.float32)))


def test_write_weights_copies_float32():
  master = np.arange(5, dtype=np.float32)
  out = np.empty(5, np.float32)
  write_weights(master, out)
  assert out.tobytes() == master.tobytes()
