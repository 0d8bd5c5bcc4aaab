"""Split masters. Oracle: whole ones, in bits."""

import ml_dtypes
import numpy as np
import pytest

from sojax.host.arena import Arena
from sojax.host.masters import FloatMasters, SplitMasters
from sojax.plan.buckets import Bucket, Slice, WireUnit
from sojax.reference.record import split_float32
from tests.training import (
  ROWS,
  assert_same_bits,
  batches,
  on_ranks,
  state_of,
  trainer,
)

BUCKET = Bucket(
  index=0,
  stage=0,
  group=0,
  units=(
    WireUnit((Slice(0, 0, 1000),), (1000,)),
    WireUnit((Slice(1, 0, 600),), (20, 30)),
  ),
  on_device=False,
)


def new_masters(num_shards):
  high = [
    np.split(np.zeros(unit.size, ml_dtypes.bfloat16), num_shards)
    for unit in BUCKET.units
  ]
  split = SplitMasters(BUCKET, Arena(1 << 16), high)
  return FloatMasters(BUCKET, Arena(1 << 16), num_shards), split, high


@pytest.mark.parametrize("num_shards", [1, 4])
def test_any_bits_are_read_as_they_were_written(num_shards):
  """Ranges that begin and end anywhere, also across shards."""
  whole, split, high = new_masters(num_shards)
  rng = np.random.default_rng(0)
  for number, unit in enumerate(BUCKET.units):
    for _ in range(50):
      start, stop = sorted(rng.integers(0, unit.size + 1, 2))
      bits = rng.integers(0, 2**32, stop - start, np.uint32)
      bits[: bits.size // 4] |= 0x7F800000  # many NaNs and infinities
      for masters in (whole, split):
        masters.write(number, start, bits.view(np.float32))
      a, b = sorted(rng.integers(0, unit.size + 1, 2))
      assert (
        split.read(number, a, b).tobytes() == whole.read(number, a, b).tobytes()
      )
    expected, _ = split_float32(whole.read(number, 0, unit.size))
    found = np.concatenate(high[number])
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
  "plan",
  [
    {},
    {"weights": "flow"},
    {"device_buckets": 3, "bucket_bytes": 1 << 16},
    {"grad_cast": "device"},
    {"accumulate": "host"},
    {"park": "device", "bucket_bytes": 1 << 16, "ring_slots": 1},
    {"gradients_out": "callback", "weights": "flow"},
  ],
  ids=str,
)
def test_split_masters_have_the_bits_of_whole_ones(plan):
  data = batches(6, rows=8)
  states = []
  for master in ("fp32", "split"):
    with trainer(
      {**plan, "master": master}, precision="bf16", accumulation=2
    ) as ours:
      metrics = [ours.step(batch) for batch in data]
      states.append((state_of(ours), [m.loss for m in metrics]))
      states[-1] += (ours.evaluate(data[0]),)
  (ours, our_losses, our_loss), (theirs, their_losses, their_loss) = states
  assert_same_bits(ours, theirs)
  assert our_losses == their_losses
  assert our_loss == their_loss


def test_each_rank_owns_its_shards_of_both_halves():
  data = batches(4, rows=ROWS)
  states = []
  for master in ("fp32", "split"):
    with on_ranks(4, {"master": master}, precision="bf16") as ours:
      for batch in data:
        ours.step(batch)
      states.append(state_of(ours))
  assert_same_bits(*states)


@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_any_checkpoint_is_resumed_with_split_masters_and_back(
  tmp_path, weights
):
  data = batches(6)
  plans = [{"master": "fp32"}, {"master": "split", "weights": weights}]
  with trainer(plans[0], precision="bf16") as theirs:
    for batch in data:
      theirs.step(batch)
    expected = state_of(theirs)
  for first, second in (plans, plans[::-1]):
    directory = tmp_path / first["master"]
    with trainer(first, precision="bf16") as ours:
      for batch in data[:3]:
        ours.step(batch)
      ours.save(directory)
    with trainer(second, precision="bf16") as ours:
      ours.restore(directory)
      for batch in data[3:]:
        ours.step(batch)
      assert_same_bits(state_of(ours), expected)


@pytest.mark.parametrize(
  "weights",
  ["stationary", "flow", ("stationary", "flow", "flow_once", "stationary")],
  ids=str,
)
def test_split_masters_take_no_memory_twice(weights):
  with trainer(
    {"weights": weights, "master": "split"}, precision="bf16"
  ) as ours:
    num_params = sum(leaf.size for leaf in ours.layout.model.leaves)
    host = ours.account.host
    assert host["masters"] == host["working_copy"] == 2 * num_params
    assert host["ring"] == 0
    copies = [x for xs in ours._parts.weights._copies.values() for x in xs]
    assert sum(x.array.nbytes for x in copies) == host["working_copy"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_only_bf16_has_split_masters(precision):
  with pytest.raises(ValueError, match=f"precision='{precision}'; use 'bf16'"):
    trainer({"master": "split"}, precision=precision)
