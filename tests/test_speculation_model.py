"""Host buckets whose steps come and go at random.

Oracle: the NumPy twin of AdamW, step after step, which takes only the steps
that count; for what was taken back, the bytes before.
"""

import functools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojax.host.arena import Arena
from sojax.host.kernels import Pool
from sojax.host.speculation import SpeculativeBucket, make_host_buckets
from sojax.plan.adamw import adam_scalars, adamw
from sojax.plan.buckets import Leaf, ModelShape, plan_buckets
from sojax.plan.casts import SeparateCasts
from sojax.plan.plan import Plan
from sojax.reference.accumulate import chunk_sums_of_squares
from sojax.reference.adamw import (
  adamw_float32,
  round_to_bfloat16,
  round_to_float16,
)
from tests.kernel_cases import assert_same_floats
from tests.speculating import SCHEMES

SIZES = (5, 1024, 4097, 700, 40_000, 3)
"""Of the leaves. One needs several chunks of a record."""

HYPER = adamw(3e-3, b2=0.95, weight_decay=0.1)
KINDS = ("master", "mu", "nu")
ROUNDINGS = {
  np.float32: np.array,
  ml_dtypes.bfloat16: round_to_bfloat16,
  np.float16: round_to_float16,
}
DTYPES = list(ROUNDINGS)


@functools.cache
def layout_of(num_shards):
  """Two stages, three or more buckets; units of several slices."""
  model = ModelShape(
    stage_names=("first", "second"),
    leaves=tuple(
      Leaf(name=f"leaf_{i}", stage=i // 3, shape=(size,), group=0)
      for i, size in enumerate(SIZES)
    ),
    borrowed=((), ()),
    groups=(HYPER,),
  )
  return plan_buckets(
    model, bucket_bytes=1 << 16, elem_bytes=2, num_shards=num_shards
  )


def gradient_of(kind, size, rng):
  """Gradients of one kind, float32 [size]; none is a kind of its own."""
  normal = rng.standard_normal(size, np.float32) * np.float32(1e-2)
  if kind == "one infinite":
    normal[rng.integers(size)] = np.inf
  elif kind == "all nan":
    normal[:] = np.nan
  elif kind == "zero":
    normal[:] = 0
  elif kind == "subnormal":
    normal *= np.float32(1e-37)
  elif kind == "few spikes":
    normal[rng.integers(size, size=1 + size // 50)] *= np.float32(1e4)
  elif kind != "normal":
    with np.errstate(over="ignore"):
      normal *= np.float32(kind)
  return normal


GRADIENTS = st.sampled_from(
  ["normal"] * 4
  + ["one infinite", "all nan", "zero", "subnormal", "few spikes"]
  + ["10", "1e3", "1e6"]
)
STEPS = st.lists(
  st.tuples(
    st.sampled_from(["step", "commit", "undo", "redo"]),
    GRADIENTS,
    # What gradients are multiplied by: first, and again.
    st.sampled_from([1.0, 2.0**-12]),
    st.floats(1e-6, 0.999),
  ),
  min_size=1,
  max_size=7,
)


class Pair:
  """A bucket and its twin, which takes a step only once that counts."""

  def __init__(self, bucket: SpeculativeBucket, num_shards, dtype, rng):
    self.ours = bucket
    self.count = 0
    self._shards = num_shards
    self._dtype = dtype
    self._rng = rng
    for number, unit in enumerate(bucket.bucket.units):
      values = rng.standard_normal(unit.size, np.float32)
      bucket.write("master", number, 0, values)
    self._twin = [self._state(kind) for kind in KINDS]

  def act(self, pool, action, grads, scale, new_scale):
    """Takes a step in one of the ways, and compares every bit."""
    ours = self.ours
    shards = self._cut(grads.astype(self._dtype))
    scalars = adam_scalars(HYPER, self.count)
    before = self._bytes()
    out = self._garbage()
    if action == "step":
      ours.step(pool, shards, out, scalars, scale)
    else:
      sum_squares = bool(self._rng.integers(2))
      sumsq = ours.speculate(
        pool, shards, out, scalars, scale, sum_squares=sum_squares
      )
      assert ours.pending
      assert (sumsq is not None) is sum_squares
      if sumsq is not None:
        self._check_squares(shards, sumsq)
      out = self._settle(pool, action, out, new_scale)
      assert not ours.pending
    if action == "undo":
      assert self._bytes() == before
    else:
      factor = new_scale if action == "redo" else scale
      grads = np.concatenate([x for unit in shards for x in unit])
      self._twin = [*adamw_float32(*self._twin, grads, scalars, factor)]
      self.count += 1
    self._check(out)

  def _settle(self, pool, action, out, new_scale):
    """Returns the weights that are sent at last."""
    ours, again = self.ours, self._garbage()
    if action == "redo":
      ours.redo(pool, again, new_scale)
      return again
    if action == "undo":
      ours.undo(pool)
    elif ours.commit(pool):
      return out
    ours.masters.round_to(again, pool)
    return again

  def _check(self, weights):
    rounded = ROUNDINGS[self._dtype](self._twin[0])
    sent = np.concatenate([x for unit in weights for x in unit])
    if self._dtype is np.float32:
      assert_same_floats(sent, rounded)
    else:
      assert sent.tobytes() == rounded.tobytes()
    for kind, twin in zip(KINDS, self._twin, strict=True):
      assert_same_floats(self._state(kind), twin)

  def _check_squares(self, shards, sumsq):
    """The sum of squares, whatever was left out of the step."""
    flat = [x for unit in shards for x in unit]
    with np.errstate(over="ignore", invalid="ignore"):
      theirs = sum(chunk_sums_of_squares(x).sum() for x in flat)
    np.testing.assert_array_equal(sumsq, theirs)

  def _bytes(self):
    return [self._state(kind).tobytes() for kind in KINDS]

  def _state(self, kind):
    """A copy, all units one after the other."""
    units = enumerate(self.ours.bucket.units)
    return np.concatenate(
      [self.ours.read(kind, number, 0, unit.size) for number, unit in units]
    )

  def _cut(self, flat):
    bounds = np.cumsum([u.size for u in self.ours.bucket.units])[:-1]
    units = np.split(flat, bounds)
    return [np.split(unit, self._shards) for unit in units]

  def _garbage(self):
    """Where weights go: what is not written is noticed."""
    bits = self._rng.bytes(
      self.ours.bucket.size * np.dtype(self._dtype).itemsize
    )
    return self._cut(np.frombuffer(bits, self._dtype).copy())


def start(scheme, cap, num_shards, dtype, pool, seed):
  plan = Plan(speculation=scheme, escape_bytes_per_param=cap)
  rng = np.random.default_rng(seed)
  buckets = make_host_buckets(
    layout_of(num_shards),
    plan,
    SeparateCasts(widen=False, narrow=False),
    functools.partial(Arena, pool=pool),
  )
  assert len(buckets) > 2
  return [Pair(b, num_shards, dtype, rng) for b in buckets.values()], rng


@pytest.fixture(scope="module")
def pool():
  with Pool(2) as pool:
    yield pool


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=40)
@given(
  steps=STEPS,
  cap=st.sampled_from([0, 0.001, 0.01, 0.1, 0.5, 2, 4, 7.9, 12]),
  num_shards=st.sampled_from([1, 2, 4]),
  seed=st.integers(0, 2**16),
)
def test_only_the_steps_that_count_leave_a_trace(
  pool, dtype, scheme, steps, cap, num_shards, seed
):
  """Buckets take turns; each has gradients of its own."""
  pairs, rng = start(scheme, cap, num_shards, dtype, pool, seed)
  for number, (action, kind, scale, new_scale) in enumerate(steps):
    for pair in pairs[number % 2 :] + pairs[: number % 2]:
      grads = gradient_of(kind, pair.ours.bucket.size, rng)
      pair.act(pool, action, grads, scale, new_scale)


@pytest.mark.parametrize("action", ["commit", "undo", "redo"])
@pytest.mark.parametrize("cap", [0, 0.5, 2.0])
@pytest.mark.parametrize("form", ["record2", "record3"])
def test_a_full_record_settles_like_any_other(pool, form, cap, action):
  """Some chunks escape beyond the cap: they are left out, others are not."""
  pairs, rng = start(form, cap, 2, ml_dtypes.bfloat16, pool, seed=1)
  left_out = []
  for pair in pairs:
    size = pair.ours.bucket.size
    for _ in range(2):
      grads = gradient_of("normal", size, rng)
      pair.act(pool, "step", grads, 1.0, 0.37)
    speculate = pair.ours.speculate

    def noting(*args, pair=pair, speculate=speculate, **kwargs):
      sumsq = speculate(*args, **kwargs)
      record = pair.ours._record
      left_out.append((record.num_left_out(), record.offsets.size - 1))
      return sumsq

    pair.ours.speculate = noting
    grads = gradient_of("normal", size, rng)
    grads[size // 2 :] *= np.float32(1e6)
    pair.act(pool, action, grads, 1.0, 0.37)
    pair.ours.speculate = speculate
    pair.act(pool, "commit", gradient_of("normal", size, rng), 1.0, 0.37)
  assert any(some for some, _ in left_out)
  if cap > 0:
    assert any(some < all_ for some, all_ in left_out)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_buckets_are_pending_side_by_side(pool, scheme):
  """All are ahead before the first is settled, in another order."""
  pairs, rng = start(scheme, 0.5, 2, ml_dtypes.bfloat16, pool, seed=2)
  before = [pair._bytes() for pair in pairs]
  scalars = adam_scalars(HYPER, 0)
  for pair in pairs:
    grads = gradient_of("few spikes", pair.ours.bucket.size, rng)
    shards = pair._cut(grads.astype(ml_dtypes.bfloat16))
    pair.ours.speculate(pool, shards, pair._garbage(), scalars, 1.0)
  assert all(
    old != pair._bytes() for old, pair in zip(before, pairs, strict=True)
  )
  for old, pair in reversed([*zip(before, pairs, strict=True)]):
    pair.ours.undo(pool)
    assert old == pair._bytes()
  for pair in pairs:
    grads = gradient_of("normal", pair.ours.bucket.size, rng)
    pair.act(pool, "commit", grads, 1.0, 0.5)
