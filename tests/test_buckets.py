"""Buckets. Oracle: properties that hold for every model and bucket size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojax.plan.adamw import adamw
from sojax.plan.buckets import (
  CHUNK_ELEMS,
  LARGE_SLICE_BYTES,
  Layout,
  Leaf,
  ModelShape,
  plan_buckets,
)
from sojax.plan.plan import Plan


def model_shape(leaves, borrowed=None):
  """Builds a model from (stage, shape, group) triples."""
  num_stages = max(stage for stage, _, _ in leaves) + 1
  return ModelShape(
    stage_names=tuple(f"stage_{i}" for i in range(num_stages)),
    leaves=tuple(
      Leaf(
        name=f"stage_{stage}.leaf_{i}", stage=stage, shape=shape, group=group
      )
      for i, (stage, shape, group) in enumerate(leaves)
    ),
    borrowed=borrowed or ((),) * num_stages,
    groups=(adamw(1e-3), adamw(1e-3, weight_decay=0.0)),
  )


SHAPES = st.lists(st.integers(1, 300), min_size=0, max_size=3).map(tuple)
LEAVES = st.lists(
  st.tuples(st.integers(0, 3), SHAPES, st.sampled_from([None, 0, 1])),
  min_size=1,
  max_size=12,
).map(lambda leaves: sorted(leaves, key=lambda leaf: leaf[0]))


def covered(layout: Layout) -> list[np.ndarray]:
  """Counts how often each element of each leaf is in a bucket."""
  counts = [np.zeros(leaf.size, int) for leaf in layout.model.leaves]
  for bucket in layout.buckets:
    for piece in bucket.slices:
      counts[piece.leaf][piece.start : piece.stop] += 1
  return counts


@settings(deadline=None)
@given(LEAVES, st.integers(1 << 16, 1 << 22), st.sampled_from([2, 4]))
def test_every_element_is_in_one_bucket(leaves, bucket_bytes, elem_bytes):
  model = model_shape(leaves)
  layout = plan_buckets(model, bucket_bytes=bucket_bytes, elem_bytes=elem_bytes)
  assert all(np.all(count == 1) for count in covered(layout))
  stages = [bucket.stage for bucket in layout.buckets]
  assert stages == sorted(stages, reverse=True)
  for index, bucket in enumerate(layout.buckets):
    assert bucket.index == index
    assert bucket.size * elem_bytes <= bucket_bytes
    assert bucket.size == sum(piece.size for piece in bucket.slices)
    for piece in bucket.slices:
      leaf = model.leaves[piece.leaf]
      assert (leaf.stage, leaf.group) == (bucket.stage, bucket.group)


@settings(deadline=None)
@given(LEAVES, st.integers(1 << 16, 1 << 22), st.sampled_from([2, 4]))
def test_a_unit_is_one_large_slice_or_the_small_ones(
  leaves, bucket_bytes, elem_bytes
):
  layout = plan_buckets(
    model_shape(leaves), bucket_bytes=bucket_bytes, elem_bytes=elem_bytes
  )
  for bucket in layout.buckets:
    small_units = 0
    for unit in bucket.units:
      assert unit.size == sum(piece.size for piece in unit.slices)
      sizes = [piece.size * elem_bytes for piece in unit.slices]
      if max(sizes) < LARGE_SLICE_BYTES:
        small_units += 1
      else:
        assert len(sizes) == 1
    assert small_units <= 1


def test_a_leaf_that_fits_is_not_cut_and_keeps_its_shape():
  model = model_shape([(0, (512, 1024), 0), (0, (7,), 0), (0, (), 0)])
  (bucket,) = plan_buckets(model, bucket_bytes=4 << 20, elem_bytes=4).buckets
  assert [unit.shape for unit in bucket.units] == [(512, 1024), (8,)]


def test_a_large_leaf_is_cut_at_rows_into_about_equal_pieces():
  model = model_shape([(0, (1000, 1024), 0)])
  layout = plan_buckets(model, bucket_bytes=1 << 20, elem_bytes=4)
  shapes = [unit.shape for b in layout.buckets for unit in b.units]
  # A cut falls on a multiple of 4 rows, which are one chunk.
  assert shapes == [(248, 1024), (252, 1024), (248, 1024), (252, 1024)]


def test_a_leaf_is_cut_between_chunks_where_rows_and_chunks_rarely_meet():
  """32 rows of 100,096 elements are the least that chunks divide."""
  model = model_shape([(0, (33, 100_096), 0)])
  layout = plan_buckets(model, bucket_bytes=1 << 20, elem_bytes=4)
  sizes = [bucket.size for bucket in layout.buckets]
  assert all(size % CHUNK_ELEMS == 0 for size in sizes[:-1])
  assert all(len(u.shape) == 1 for b in layout.buckets for u in b.units)
  assert max(sizes) - min(sizes) <= 2 * CHUNK_ELEMS
  assert max(sizes) <= 1 << 18


@settings(deadline=None)
@given(
  st.integers(1, 400),
  st.integers(1, 20_000),
  st.integers(1 << 16, 1 << 22),
  st.sampled_from([2, 4]),
)
def test_every_cut_falls_between_chunks(rows, row_elems, limit, elem_bytes):
  model = model_shape([(0, (rows, row_elems), 0), (0, (rows, 7), 0)])
  layout = plan_buckets(model, bucket_bytes=limit, elem_bytes=elem_bytes)
  assert all(np.all(count == 1) for count in covered(layout))
  for bucket in layout.buckets:
    assert bucket.size * elem_bytes <= limit
    for piece in bucket.slices:
      assert piece.start % CHUNK_ELEMS == 0
      leaf = model.leaves[piece.leaf]
      assert piece.stop % CHUNK_ELEMS == 0 or piece.stop == leaf.size


def test_device_buckets_are_the_trained_ones_that_finish_last():
  model = model_shape(
    [(0, (10,), None), (0, (10,), 0), (0, (10,), 1), (1, (10,), 0)]
  )
  layout = plan_buckets(
    model, bucket_bytes=1 << 16, elem_bytes=4, device_buckets=2
  )
  homes = [(b.stage, b.group, b.on_device) for b in layout.buckets]
  assert homes == [(1, 0, False), (0, None, False), (0, 0, True), (0, 1, True)]


@pytest.mark.parametrize(
  ("ratio", "num_buckets", "on_device"),
  [
    (0.8, 20, 4),
    (0.9, 10, 1),  # cut off, (1 - 0.9) * 10 is 0
    (0.57, 100, 43),  # cut off, 0.57 * 100 is 56
    (1 - 0.7, 10, 7),  # 0.30000000000000004
    (0.29, 50, 35),  # 14.5 of the host become 15; as a float they are fewer
    (np.float64(0.7), 5, 1),  # 3.5 become 4
    (0.5, 5, 2),
    (0.49, 5, 3),
    (0.05, 10, 9),
    (0.04, 10, 10),
    (0, 3, 3),
    (0.0, 3, 3),
    (1, 3, 0),
    (1e-320, 3, 3),
  ],
)
def test_a_host_ratio_is_the_decimal_number_that_is_written(
  ratio, num_buckets, on_device
):
  model = model_shape([(0, (1 << 14,), 0)] * num_buckets)
  plan = Plan(host_ratio=ratio)
  layout = plan_buckets(
    model, bucket_bytes=1 << 16, elem_bytes=4, host_ratio=plan.host_ratio
  )
  assert [b.on_device for b in layout.buckets] == (
    [False] * (num_buckets - on_device) + [True] * on_device
  )


def test_more_device_buckets_than_buckets_are_refused():
  model = model_shape([(0, (10,), 0), (1, (10,), None)])
  with pytest.raises(
    ValueError, match="device_buckets=2 exceeds the 1 trained"
  ):
    plan_buckets(model, bucket_bytes=1 << 16, elem_bytes=4, device_buckets=2)


def test_a_bucket_that_holds_no_chunk_is_refused():
  model = model_shape([(0, (10,), 0)])
  with pytest.raises(ValueError, match="chunk of 4096 elements of 2 bytes"):
    plan_buckets(model, bucket_bytes=8191, elem_bytes=2)
  plan_buckets(model, bucket_bytes=8192, elem_bytes=2)


def test_a_parameter_without_elements_is_refused():
  model = model_shape([(0, (3, 0), 0)])
  with pytest.raises(ValueError, match=r"stage_0.leaf_0 has shape \(3, 0\)"):
    plan_buckets(model, bucket_bytes=1 << 16, elem_bytes=4)


def test_used_by_adds_the_buckets_of_tied_weights():
  model = model_shape(
    [(0, (1 << 15,), 0), (0, (1 << 15,), 0), (1, (10,), 0)], ((), (1,))
  )
  layout = plan_buckets(model, bucket_bytes=1 << 17, elem_bytes=4)
  assert [b.index for b in layout.used_by(1)] == [0, 2]
  assert [b.index for b in layout.used_by(0)] == [1, 2]
