"""The kernels that add gradients up: sums, and sums of squares by chunk.

Oracles: the NumPy twins for bits, exact sums (math.fsum) for the meaning.
"""

import itertools
import math

import numpy as np
import pytest

from sojax.host.kernels import CHUNK_ELEMS, AccumulateSegment, Pool
from tests.kernel_cases import (
  BF16,
  F16,
  F32,
  F64,
  FLOAT_MIN,
  GRAD_DTYPES,
  SPECIAL,
  SUM_METHODS,
  FpMode,
  SumState,
  assert_same_floats,
  assert_same_sums,
  every_grad,
  every_isa,
  float16_values,
  guarded_state,
  random_sums,
)

every_method = pytest.mark.parametrize("method", SUM_METHODS)
with_and_without_squares = pytest.mark.parametrize("with_squares", [0, 1])


def run(pool, method, states):
  getattr(pool, method)([x.segment() for x in states])


def chunk_sums(isa, x):
  """The sums of squares of float32 values, by the kernel."""
  state = SumState(np.zeros_like(x), x, np.zeros(-(-x.size // CHUNK_ELEMS)))
  with Pool(1, isa=isa) as pool:
    run(pool, "widen", [state])
  return state.sumsq


def test_a_chunk_is_what_the_twin_takes_it_to_be():
  assert CHUNK_ELEMS == 4096


# Bits.


@every_isa
@every_method
@every_grad
@with_and_without_squares
def test_every_short_length_has_the_twins_bits_and_keeps_its_neighbours(
  isa, method, grad_dtype, with_squares
):
  with Pool(1, isa=isa) as pool:
    # Far past twice the 16 elements of one turn of the main loop.
    for n in range(130):
      state = random_sums(n, grad_dtype, with_squares, seed=n)
      expected = state.twin(method)
      # Every address, odd bytes included, turns up for some array.
      offsets = [(n * step) % 64 for step in (1, 3, 5)]
      state, check_guards = guarded_state(state, offsets)
      run(pool, method, [state])
      assert_same_sums(state, expected)
      check_guards()


@every_isa
@every_method
@every_grad
@with_and_without_squares
def test_lengths_next_to_whole_chunks_have_the_twins_bits(
  isa, method, grad_dtype, with_squares
):
  original = random_sums(3 * CHUNK_ELEMS + 40, grad_dtype, with_squares)
  with Pool(1, isa=isa) as pool:
    for num_chunks, extra in itertools.product(
      (1, 2, 3), (-33, -17, -16, -15, -9, -8, -1, 0, 1, 7, 8, 9, 16, 17, 33)
    ):
      n = num_chunks * CHUNK_ELEMS + extra
      sumsq = original.sumsq[: -(-n // CHUNK_ELEMS)] if with_squares else None
      state = SumState(original.total[:n], original.grad[:n], sumsq)
      expected = state.twin(method)
      state, check_guards = guarded_state(state, [n % 64, 7 * n % 64, n % 8])
      run(pool, method, [state])
      assert_same_sums(state, expected)
      check_guards()


@every_isa
@pytest.mark.parametrize("grad_dtype", [F32, F16], ids=str)
def test_alignment_does_not_matter(isa, grad_dtype):
  original = random_sums(CHUNK_ELEMS + 5, grad_dtype)
  expected = original.twin("accumulate")
  with Pool(1, isa=isa) as pool:
    for offset in range(64):
      offsets = [offset, 11 * offset % 64, 3 * offset % 64]
      state, check_guards = guarded_state(original, offsets)
      run(pool, "accumulate", [state])
      assert_same_sums(state, expected)
      check_guards()


@every_isa
@every_method
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_cuts_do_not_change_bits(isa, method, num_threads):
  n = 200_003
  original = random_sums(n, BF16)
  expected = original.twin(method)
  rng = np.random.default_rng(1)
  with Pool(num_threads, isa=isa) as pool:
    for num_cuts in (0, 1, 20):
      # Between chunks with sums of squares, anywhere without.
      state = original.copy()
      chunks = np.sort(rng.integers(0, state.sumsq.size, num_cuts))
      parts = zip(
        np.split(state.total, CHUNK_ELEMS * chunks),
        np.split(state.grad, CHUNK_ELEMS * chunks),
        np.split(state.sumsq, chunks),
        strict=True,
      )
      run(pool, method, [SumState(*x) for x in parts])
      assert_same_sums(state, expected)

      state = original.copy()
      cuts = np.sort(rng.integers(0, n, num_cuts))
      parts = (np.split(x, cuts) for x in (state.total, state.grad))
      run(pool, method, [SumState(*x, None) for x in zip(*parts, strict=True)])
      assert_same_floats(state.total, expected.total)


@every_method
def test_segments_of_different_types_share_a_call(method):
  kinds = itertools.product(GRAD_DTYPES, [False, True], [70, 9000])
  states = [random_sums(n, *kind, seed=n) for *kind, n in kinds]
  expected = [state.twin(method) for state in states]
  with Pool(2) as pool:
    run(pool, method, states)
  for state, twin in zip(states, expected, strict=True):
    assert_same_sums(state, twin)


@every_isa
@every_method
def test_nothing_to_do_is_fine(isa, method):
  with Pool(2, isa=isa) as pool:
    run(pool, method, [])
    run(pool, method, [random_sums(0), random_sums(0, BF16, False)])


@every_method
def test_segments_may_share_a_gradient(method):
  first = random_sums(50, seed=0)
  second = SumState(random_sums(50, seed=1).total, first.grad, None)
  expected = [first.twin(method), second.twin(method)]
  with Pool(2) as pool:
    run(pool, method, [first, second])
  assert_same_sums(first, expected[0])
  assert_same_sums(second, expected[1])


@every_isa
@every_grad
@every_method
def test_special_values_have_the_twins_bits(isa, grad_dtype, method):
  # All pairs, then each once more alone in a chunk of ordinary numbers.
  total, grad = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
  ordinary = random_sums(SPECIAL.size * CHUNK_ELEMS)
  ordinary.grad[5 :: CHUNK_ELEMS + 1] = SPECIAL
  with np.errstate(all="ignore"):
    state = SumState(
      np.concatenate([ordinary.total, total]),
      np.concatenate([ordinary.grad, grad]).astype(grad_dtype),
      np.zeros(SPECIAL.size + 1),
    )
  assert total.size < CHUNK_ELEMS
  expected = state.twin(method)
  with Pool(1, isa=isa) as pool:
    run(pool, method, [state])
  assert_same_sums(state, expected)
  # What is not finite shows in its own chunk, and in no other.
  with np.errstate(all="ignore"):
    is_finite = np.isfinite(SPECIAL.astype(grad_dtype).astype(F32))
  np.testing.assert_array_equal(np.isfinite(state.sumsq[:-1]), is_finite)


@every_isa
@every_grad
@every_method
def test_random_bit_patterns_have_the_twins_bits(isa, grad_dtype, method):
  rng = np.random.default_rng(2)
  n = 1 << 16
  total, grad = (
    np.frombuffer(rng.bytes(n * dtype.itemsize), dtype).copy()
    for dtype in (F32, grad_dtype)
  )
  state = SumState(total, grad, None)
  expected = state.twin(method)
  with Pool(1, isa=isa) as pool:
    run(pool, method, [state])
  assert_same_sums(state, expected)


@every_isa
def test_subnormals_survive_a_caller_that_flushes_them(isa):
  state = random_sums(5000)
  state.total *= F32.type(1e-39)
  state.grad *= F32.type(1e-39)
  expected = state.twin("accumulate")
  assert np.all(np.abs(expected.total) < FLOAT_MIN)
  assert np.all(expected.sumsq > 0)
  with FpMode() as mode:
    with Pool(1, isa=isa) as pool:
      run(pool, "accumulate", [state])
    assert mode.flushes()
  assert not mode.flushes()
  assert_same_sums(state, expected)


@every_isa
def test_float16_is_widened_exactly_under_a_caller_that_flushes(isa):
  halves = np.arange(1 << 16, dtype=np.uint32)
  grad = halves.astype(np.uint16).view(F16)
  total = np.ones(grad.size, F32)
  with FpMode(), Pool(1, isa=isa) as pool:
    pool.widen([AccumulateSegment(total, grad)])
  assert_same_floats(total, float16_values().astype(F32))
  # A NaN keeps its sign and payload and becomes quiet, on every CPU.
  bits = (halves & 0x8000) << 16 | 0x7FC00000 | (halves & 0x3FF) << 13
  is_nan = np.isnan(total)
  np.testing.assert_array_equal(total.view(np.uint32)[is_nan], bits[is_nan])


# Meaning.


@every_isa
def test_widening_forgets_what_was_there(isa):
  grad = np.array([1.5, -0.0, 2.0**-133, np.inf] * 5, BF16)
  total = np.full(grad.size, np.nan, F32)
  with Pool(1, isa=isa) as pool:
    pool.widen([AccumulateSegment(total, grad)])
    assert_same_floats(total, grad.astype(F32))
    pool.accumulate([AccumulateSegment(total, grad)])
    assert_same_floats(total, 2 * grad.astype(F32))


@every_isa
@pytest.mark.parametrize("n", [1, 16, 100, 4096, 10_000])
def test_sums_of_squares_are_within_their_roundings_of_the_exact_sum(isa, n):
  x = random_sums(n, seed=n).grad * np.exp2(np.arange(n) % 40).astype(F32)
  squares = x.astype(F64) ** 2
  for actual, chunk in zip(
    chunk_sums(isa, x),
    np.split(squares, range(CHUNK_ELEMS, n, CHUNK_ELEMS)),
    strict=True,
  ):
    # Squares are exact; each is in at most 256 + 4 sums of positive terms.
    exact = math.fsum(chunk)
    assert abs(actual - exact) <= (CHUNK_ELEMS / 16 + 4) * 2.0**-53 * exact


@every_isa
def test_squares_are_added_by_lane_and_lanes_by_halves(isa):
  # Added to 2^54, whose neighbour is 4 away, a square of 1.5625 is lost. Two
  # that met before are not: what is left tells who met whom first.
  def left(*, big, small):
    x = np.zeros(CHUNK_ELEMS, F32)
    x[big] = 2.0**27
    x[list(small)] = 1.25
    return chunk_sums(isa, x)[0] - 2.0**54

  # One lane, elements in order.
  assert left(big=0, small=(16, 32)) == 0
  assert left(big=4080, small=(0, 16)) == 4
  assert left(big=32, small=(16, 48)) == 0
  # Lane 8 comes to lane 0 first, then 4, then 2, then 1.
  for small in ((8, 4), (8, 2), (8, 1), (4, 2), (4, 1), (2, 1)):
    assert left(big=0, small=small) == 0
  # Lanes that meet on their way there.
  for small in ((12, 4), (10, 2), (6, 2), (14, 6), (9, 1), (5, 1), (3, 1)):
    assert left(big=0, small=small) == 4
