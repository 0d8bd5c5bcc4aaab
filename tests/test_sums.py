"""Sums of gradients on the host. Oracle: the NumPy twins, leaf by leaf."""

import ml_dtypes
import numpy as np
import pytest

from sojax.host.kernels import Pool
from sojax.host.sums import GradientSums
from sojax.plan.adamw import adamw
from sojax.plan.buckets import Leaf, ModelShape, plan_buckets
from sojax.reference.accumulate import (
  accumulate_float32,
  chunk_sums_of_squares,
)

SIZES = (5, 4096, 4097, 90_001, 3, 50_000)
NOT_TRAINED = 4
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def layout_of(
  bucket_bytes=1 << 26, device_buckets=0, elem_bytes=2, num_shards=1
):
  """Two stages; one leaf is not trained, and some are larger than a bucket."""
  leaves = [
    Leaf(
      name=f"leaf_{i}",
      stage=i // 3,
      shape=(size,),
      group=None if i == NOT_TRAINED else 0,
    )
    for i, size in enumerate(SIZES)
  ]
  model = ModelShape(
    stage_names=("first", "second"),
    leaves=tuple(leaves),
    borrowed=((), ()),
    groups=(adamw(1e-3),),
  )
  return plan_buckets(
    model,
    bucket_bytes=bucket_bytes,
    elem_bytes=elem_bytes,
    device_buckets=device_buckets,
    num_shards=num_shards,
  )


def random_grads(num_micro, dtype):
  rng = np.random.default_rng(0)
  return [
    [rng.standard_normal(size).astype(dtype) for size in SIZES]
    for _ in range(num_micro)
  ]


def on_host(layout):
  return [b for b in layout.buckets if b.trained and not b.on_device]


def packed(bucket, grads, num_shards=1):
  """Returns the shards of every wire unit, cut out of whole leaves."""

  def shards(unit):
    pieces = [grads[s.leaf][s.start : s.stop] for s in unit.slices]
    zeros = np.zeros(unit.size - sum(x.size for x in pieces), pieces[0].dtype)
    return np.split(np.concatenate([*pieces, zeros]), num_shards)

  return [shards(unit) for unit in bucket.units]


def assert_same_sums(ours, theirs):
  """Compares the bits of all shards."""
  for our_shards, their_shards in zip(ours, theirs, strict=True):
    for our, their in zip(our_shards, their_shards, strict=True):
      assert our.dtype == their.dtype == np.float32
      assert our.tobytes() == their.tobytes()


def add_all(layout, micro_batches, threads=2):
  sums = GradientSums(layout)
  last = len(micro_batches) - 1
  with Pool(threads) as pool:
    for micro, grads in enumerate(micro_batches):
      for bucket in on_host(layout):
        units = packed(bucket, grads, layout.num_shards)
        sums.add(pool, bucket, units, first=micro == 0, last=micro == last)
  return sums


def expected_sums(micro_batches):
  totals = [grad.astype(np.float32) for grad in micro_batches[0]]
  for grads in micro_batches[1:]:
    totals = [
      accumulate_float32(total, grad)
      for total, grad in zip(totals, grads, strict=True)
    ]
  return totals


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_micro", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 16, 1 << 26])
def test_sums_and_their_squares_have_the_twins_bits(
  dtype, num_micro, bucket_bytes
):
  layout = layout_of(bucket_bytes)
  micro_batches = random_grads(num_micro, dtype)
  sums = add_all(layout, micro_batches)
  totals = expected_sums(micro_batches)
  for bucket in on_host(layout):
    assert_same_sums(sums.units(bucket), packed(bucket, totals))
  chunks = [
    chunk_sums_of_squares(total)
    for leaf, total in enumerate(totals)
    if leaf != NOT_TRAINED
  ]
  expected = np.float32(np.sum(np.concatenate(chunks)))
  assert sums.sum_of_squares() == expected
  assert sums.sum_of_squares().dtype == np.float32


@pytest.mark.parametrize("num_shards", [2, 8])
def test_sums_of_shards_have_the_twins_bits(num_shards):
  """Chunks begin anew with every shard, so that the norm is near, not equal."""
  layout = layout_of(1 << 16, num_shards=num_shards)
  micro_batches = random_grads(2, np.float32)
  sums = add_all(layout, micro_batches)
  totals = expected_sums(micro_batches)
  for bucket in on_host(layout):
    assert_same_sums(sums.units(bucket), packed(bucket, totals, num_shards))
  trained = [t for leaf, t in enumerate(totals) if leaf != NOT_TRAINED]
  exact = sum(np.sum(np.square(t, dtype=np.float64)) for t in trained)
  assert abs(sums.sum_of_squares() - exact) <= 2.0**-23 * exact


def test_new_sums_begin_with_whatever_was_left():
  layout = layout_of(1 << 16)
  first, second, third = random_grads(3, np.float32)
  sums = add_all(layout, [first])
  with Pool(1) as pool:
    for bucket in on_host(layout):  # a step that fails half-way
      units = packed(bucket, second)
      sums.add(pool, bucket, units, first=False, last=False)
    for bucket in on_host(layout):
      units = packed(bucket, third)
      sums.add(pool, bucket, units, first=True, last=True)
  expected = add_all(layout, [third])
  for bucket in on_host(layout):
    assert_same_sums(sums.units(bucket), expected.units(bucket))
  assert sums.sum_of_squares() == expected.sum_of_squares()


def test_device_buckets_do_not_count():
  layout = layout_of(1 << 16, device_buckets=2)
  (grads,) = random_grads(1, np.float32)
  assert layout.on_both_sides
  left = [grad.copy() for grad in grads]
  for bucket in layout.buckets:
    if bucket not in on_host(layout):
      for piece in bucket.slices:
        left[piece.leaf][piece.start : piece.stop] = 0.0
  chunks = np.concatenate([chunk_sums_of_squares(x) for x in left])
  found = add_all(layout, [grads]).sum_of_squares()
  exact = np.sum(chunks)
  assert abs(found - exact) <= 2.0**-23 * exact
  everything = np.sum([np.sum(np.square(g, dtype=np.float64)) for g in grads])
  assert exact < 0.9 * everything


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e20])
def test_a_sum_past_float32_is_not_finite_and_warns_of_nothing(value):
  """1e20 squared is in float64's range, and past float32's."""
  layout = layout_of()
  (grads,) = random_grads(1, np.float32)
  grads[3][89_000] = value
  assert not np.isfinite(add_all(layout, [grads]).sum_of_squares())
  grads[3][89_000] = 1e18
  assert np.isfinite(add_all(layout, [grads]).sum_of_squares())


def test_a_layout_without_host_buckets_has_a_sum_of_zero():
  layout = layout_of()
  trained = len(on_host(layout))
  sums = GradientSums(layout_of(device_buckets=trained))
  assert sums.sum_of_squares() == 0.0
