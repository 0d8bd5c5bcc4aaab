"""Leaves <-> wire units. Oracle: NumPy slices of the flat leaves."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sojax.cluster.mesh import Placement
from sojax.plan.buckets import plan_buckets
from sojax.programs.flatten import to_units, unit_specs
from sojax.programs.unpack import Unpacker
from tests.test_buckets import model_shape

PLACEMENT = Placement.of(None)
SHAPES = st.lists(
  st.sampled_from([(), (3,), (5, 7), (300, 200), (2, 40_000), (90_000,)]),
  min_size=1,
  max_size=5,
)


def cut(shapes, bucket_bytes):
  """Returns a layout, values of every leaf, and every bucket's units."""
  model = model_shape([(0, shape, 0) for shape in shapes])
  layout = plan_buckets(model, bucket_bytes=bucket_bytes, elem_bytes=4)
  rng = np.random.default_rng(0)
  leaves = [rng.standard_normal(s).astype(np.float32) for s in shapes]
  units = {
    bucket: [
      np.concatenate(
        [leaves[s.leaf].reshape(-1)[s.start : s.stop] for s in unit.slices]
      ).reshape(unit.shape)
      for unit in bucket.units
    ]
    for bucket in layout.buckets
  }
  return layout, leaves, units


@settings(max_examples=20)
@given(SHAPES, st.sampled_from([1 << 16, 1 << 18, 1 << 26]))
def test_units_hold_the_slices_of_the_leaves(shapes, bucket_bytes):
  layout, leaves, units = cut(shapes, bucket_bytes)
  flat = [unit for bucket in layout.buckets for unit in bucket.units]
  specs = unit_specs(flat, range(len(shapes)))
  found = to_units(dict(enumerate(map(jnp.asarray, leaves))), specs)
  expected = [unit for bucket in layout.buckets for unit in units[bucket]]
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_array_equal(ours, theirs)


def unpacker(layout, num_leaves, dtype="float32"):
  return Unpacker(layout.model, [range(num_leaves)], dtype, PLACEMENT)


def place(arrived):
  return {
    bucket: [jax.device_put(unit, PLACEMENT.device) for unit in units]
    for bucket, units in arrived.items()
  }


@settings(max_examples=20)
@given(SHAPES, st.sampled_from([1 << 16, 1 << 18, 1 << 26]))
def test_unpacking_all_units_gives_the_leaves(shapes, bucket_bytes):
  layout, leaves, units = cut(shapes, bucket_bytes)
  found = unpacker(layout, len(shapes)).unpack(0, place(units), {})
  assert sorted(found) == list(range(len(shapes)))
  for index, leaf in enumerate(leaves):
    np.testing.assert_array_equal(found[index], leaf)


def test_unpacking_some_units_replaces_only_their_slices():
  layout, leaves, units = cut([(300, 200), (5, 7)], 1 << 16)
  first, *_ = layout.buckets
  zeros = {
    i: place({0: [np.zeros(leaf.shape, np.float32)]})[0][0]
    for i, leaf in enumerate(leaves)
  }
  found = unpacker(layout, 2).unpack(0, place({first: units[first]}), zeros)
  ((index, leaf),) = found.items()
  piece = first.units[0].slices[0]
  expected = np.zeros(leaf.shape, np.float32).reshape(-1)
  whole = leaves[index].reshape(-1)
  expected[piece.start : piece.stop] = whole[piece.start : piece.stop]
  np.testing.assert_array_equal(np.asarray(leaf).reshape(-1), expected)


def test_unpacking_rounds_float32_units_to_the_working_dtype():
  layout, leaves, units = cut([(300, 200), (5, 7)], 1 << 26)
  found = unpacker(layout, 2, "bfloat16").unpack(0, place(units), {})
  for index, leaf in enumerate(leaves):
    bits = (leaf.view(np.uint32) + np.uint32(0x8000)) >> 16
    np.testing.assert_array_equal(
      np.asarray(found[index]).view(np.uint16), bits.astype(np.uint16)
    )


def test_slices_of_leaves_that_a_stage_does_not_use_are_left_out():
  layout, leaves, units = cut([(5, 7), (3,)], 1 << 26)
  only_second = Unpacker(layout.model, [[1]], "float32", PLACEMENT)
  found = only_second.unpack(0, place(units), {})
  assert list(found) == [1]
  np.testing.assert_array_equal(found[1], leaves[1])
