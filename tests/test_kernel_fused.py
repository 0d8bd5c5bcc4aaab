"""Split masters, and what a step does with gradients on the way.

Oracles: the NumPy twins, and the kernels that do the same one by one.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from sojax.host.kernels import CHUNK_ELEMS, Pool
from sojax.host.operations import (
  Accumulate,
  AdamwStep,
  Narrow,
  Norm,
)
from sojax.host.segments import NarrowSegment, NormSegment
from sojax.reference.accumulate import (
  accumulate_float32,
  chunk_sums_of_squares,
)
from sojax.reference.record import join_float32, split_float32
from tests.kernel_cases import (
  BF16,
  F16,
  F32,
  F64,
  GRAD_SCALE,
  LAYOUTS,
  ROUND,
  SCALARS,
  SPECIAL,
  Layout,
  SumState,
  assert_same_floats,
  assert_same_state,
  every_grad,
  every_isa,
  every_layout,
  guarded,
  guarded_state,
  random_bits,
  random_state,
  random_sums,
  state_of,
)

OFFSETS = (1, 3, 5, 7, 11, 13, 17, 19)
with_or_without_sum = pytest.mark.parametrize("with_sum", [False, True])


# Squares and sums in a step.


@every_isa
@every_layout
@with_or_without_sum
def test_every_short_length_has_the_twins_bits_and_keeps_its_neighbours(
  isa, layout, with_sum
):
  with Pool(1, isa=isa) as pool:
    for n in range(130):
      state = state_of(layout, n, n, with_sum=with_sum, with_squares=n % 4 != 0)
      expected = state.twin()
      state, check_guards = guarded_state(state, [n * x % 64 for x in OFFSETS])
      pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)
      assert_same_state(state, expected)
      check_guards()


@every_isa
@every_layout
def test_lengths_next_to_whole_chunks_have_the_twins_bits(isa, layout):
  with Pool(1, isa=isa) as pool:
    for num_chunks, extra in itertools.product(
      (1, 2), (-33, -17, -1, 0, 1, 9, 16, 33)
    ):
      n = num_chunks * CHUNK_ELEMS + extra
      state = state_of(layout, n, n, with_sum=True, with_squares=True)
      expected = state.twin()
      # Weights on a cache line and off it: some are streamed.
      for offset in (0, 4):
        copy, check_guards = guarded_state(state, [4 * n % 64] * 4 + [offset])
        pool.adamw_step([copy.segment()], SCALARS, GRAD_SCALE)
        assert_same_state(copy, expected)
        check_guards()


@every_isa
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_cuts_do_not_change_bits(isa, num_threads):
  n = 50_003
  rng = np.random.default_rng(1)
  with Pool(num_threads, isa=isa) as pool:
    for layout in (Layout(BF16, BF16), Layout(BF16, None, True)):
      original = state_of(layout, n, with_sum=True, with_squares=True)
      expected = original.twin()
      for num_cuts in (0, 1, 5):
        state = original.copy()
        cuts = np.sort(rng.integers(0, state.sumsq.size, num_cuts))
        bounds = [0, *cuts, state.sumsq.size]
        parts = []
        for start, stop in itertools.pairwise(bounds):
          part = state.map(
            lambda x, a=start, b=stop: x[a * CHUNK_ELEMS : b * CHUNK_ELEMS]
          )
          part.sumsq = state.sumsq[start:stop]
          parts.append(part.segment())
        pool.adamw_step(parts, SCALARS, GRAD_SCALE)
        assert_same_state(state, expected)


@every_isa
@every_grad
def test_a_step_with_a_sum_is_an_accumulation_and_a_step(isa, grad_dtype):
  n = 9001
  fused = random_state(n, grad_dtype, F32, with_sum=True, with_squares=True)
  sums = SumState(fused.sum.copy(), fused.grad, np.zeros_like(fused.sumsq))
  single = dataclasses.replace(
    fused.copy(), grad=sums.total, sum=None, sumsq=None
  )
  before = fused.copy()
  with Pool(2, isa=isa) as pool:
    pool.submit(AdamwStep([fused.segment()], SCALARS, GRAD_SCALE)).wait()
    pool.submit(Accumulate([sums.segment()])).wait()
    pool.submit(AdamwStep([single.segment()], SCALARS, GRAD_SCALE)).wait()
  for name in ("p", "mu", "nu", "weight"):
    x, y = getattr(fused, name), getattr(single, name)
    assert x.tobytes() == y.tobytes()
  assert fused.sumsq.tobytes() == sums.sumsq.tobytes()
  # A redo needs them.
  assert fused.sum.tobytes() == before.sum.tobytes()
  assert fused.grad.tobytes() == before.grad.tobytes()


@every_isa
def test_squares_are_those_before_grad_scale(isa):
  state = random_state(5000, with_squares=True)
  expected = chunk_sums_of_squares(state.grad)
  with Pool(1, isa=isa) as pool:
    pool.adamw_step([state.segment()], SCALARS, 1e-30)
  assert_same_floats(state.sumsq, expected)


@every_isa
def test_special_gradients_show_in_their_chunks(isa):
  state = random_state(SPECIAL.size * CHUNK_ELEMS, with_squares=True)
  state.grad[7 :: CHUNK_ELEMS + 1] = SPECIAL
  expected = state.twin()
  with Pool(2, isa=isa) as pool:
    pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)
  assert_same_state(state, expected)
  np.testing.assert_array_equal(np.isfinite(state.sumsq), np.isfinite(SPECIAL))


# Norms alone.


@every_isa
@every_grad
@with_or_without_sum
def test_a_norm_is_the_twins_and_changes_nothing(isa, grad_dtype, with_sum):
  with Pool(1, isa=isa) as pool:
    for n in [*range(70), 4095, 4096, 4097, 3 * CHUNK_ELEMS + 33]:
      sums = random_sums(n, grad_dtype, seed=n)
      total, check_total = guarded(sums.total, n % 64)
      grad, check_grad = guarded(sums.grad, 3 * n % 64)
      sumsq, check_sumsq = guarded(sums.sumsq, 5 * n % 64)
      expected = grad.astype(F32)
      if with_sum:
        expected = accumulate_float32(total, grad)
      before = total.tobytes(), grad.tobytes()
      segment = NormSegment(grad, sumsq, total if with_sum else None)
      pool.submit(Norm([segment])).wait()
      assert_same_floats(sumsq, chunk_sums_of_squares(expected))
      assert before == (total.tobytes(), grad.tobytes())
      for check in (check_total, check_grad, check_sumsq):
        check()


@every_isa
def test_a_norm_of_random_bits_is_the_twins(isa):
  rng = np.random.default_rng(3)
  for dtype in (F32, BF16, F16):
    grad = random_bits(rng, np.zeros(100_000, dtype))
    sumsq = np.zeros(-(-grad.size // CHUNK_ELEMS))
    with Pool(2, isa=isa) as pool:
      pool.submit(Norm([NormSegment(grad, sumsq)])).wait()
    with np.errstate(invalid="ignore"):
      wide = grad.astype(F32)
    assert_same_floats(sumsq, chunk_sums_of_squares(wide))


# Weights alone.


@every_isa
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_narrowing_rounds_as_the_twin(isa, dtype):
  rng = np.random.default_rng(4)
  with Pool(2, isa=isa) as pool:
    for n in [*range(70), 100_003]:
      p = random_bits(rng, np.zeros(n, F32))
      p, check_p = guarded(p, n % 64)
      weight, check_weight = guarded(np.zeros(n, dtype), 3 * n % 64)
      pool.submit(Narrow([NarrowSegment(p, weight)])).wait()
      expected = ROUND[dtype](p)
      if dtype == F32:
        assert_same_floats(weight, expected)
      else:
        assert weight.tobytes() == expected.tobytes()
      check_p()
      check_weight()


def test_norms_and_weights_need_somewhere_to_go():
  x = np.zeros(3, F32)
  with Pool(1) as pool:
    with pytest.raises(TypeError, match="weight_out is None"):
      pool.submit(Narrow([NarrowSegment(x, None)]))
    with pytest.raises(TypeError, match="sumsq_out is None"):
      pool.submit(Norm([NormSegment(x, None)]))


# Split masters.


def test_every_pair_of_halves_is_one_float_and_back():
  rng = np.random.default_rng(5)
  bits = np.concatenate(
    [
      rng.integers(0, 1 << 32, 100_000),
      [0, 0x7FFF, 0x8000, 0xFFFF, 0x7F7FFFFF, 0x7F800001, 0xFFFFFFFF],
    ]
  ).astype(np.uint32)
  high, low = split_float32(bits.view(F32))
  assert join_float32(high, low).tobytes() == bits.tobytes()
  # And every pair is the split of its float.
  high, low = (random_bits(rng, x) for x in (high, low))
  again = split_float32(join_float32(high, low))
  assert (again[0].tobytes(), again[1].tobytes()) == (
    high.tobytes(),
    low.tobytes(),
  )


@every_isa
@pytest.mark.parametrize("grad_dtype", [F32, BF16], ids=str)
def test_a_split_master_moves_as_a_whole_one(isa, grad_dtype):
  whole = random_state(10_001, grad_dtype, BF16)
  whole.grad[5] = np.nan
  split = state_of(Layout(grad_dtype, None, True), 10_001)
  split.grad[5] = np.nan
  with Pool(2, isa=isa) as pool:
    for _ in range(5):
      for state in (whole, split):
        pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)
  assert_same_floats(split.mu, whole.mu)
  assert_same_floats(split.nu, whole.nu)
  assert_same_floats(join_float32(split.p, split.p_low), whole.p)
  # The high half is the working weight.
  assert split.p.tobytes() == whole.weight.tobytes()


@every_isa
def test_split_masters_of_all_sizes_have_the_twins_bits(isa):
  p, mu, grad = (
    x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL, SPECIAL, copy=True)
  )
  state = dataclasses.replace(random_state(p.size), mu=mu, grad=grad)
  state.p, state.p_low = split_float32(p)
  state.nu[:] = 1
  expected = state.twin(grad_scale=1.0)
  with Pool(2, isa=isa) as pool:
    pool.adamw_step([state.segment()], SCALARS, 1.0)
  assert_same_state(state, expected)
  whole = join_float32(state.p, state.p_low)
  assert state.p.tobytes() == ROUND[BF16](whole).tobytes()


# What they refuse.


@pytest.mark.parametrize(
  "layout, match",
  [
    (Layout(F16, BF16), "gradients of float16 and weights out of bfloat16"),
    (Layout(BF16, F16), "gradients of bfloat16 and weights out of float16"),
    (Layout(F16, None, True), "gradients of float16, split masters"),
    (Layout(BF16, BF16, True), "split masters and weights out of bfloat16"),
  ],
  ids=str,
)
def test_types_that_no_plan_asks_for_are_refused(layout, match):
  assert layout not in LAYOUTS
  state = state_of(layout, 10)
  before = [x.tobytes() for x in state.arrays()]
  with Pool(1) as pool, pytest.raises(ValueError, match=match):
    pool.adamw_step([state.segment()], SCALARS, 1.0)
  assert before == [x.tobytes() for x in state.arrays()]


@pytest.mark.parametrize(
  "field, change, match",
  [
    ("p_low", lambda x: x.astype(np.uint16), "p_low_inout has dtype uint16"),
    ("p_low", lambda x: x[1:], "p_low_inout has 9 elements, p_inout 10"),
    ("p_low", lambda x: np.repeat(x, 2)[::2], "p_low_inout has a stride"),
    ("p", lambda x: x.astype(F32), "p_inout has dtype float32; give bfloat16"),
    ("sum", lambda x: x.astype(F64), "sum has dtype float64"),
    ("sum", lambda x: x.reshape(2, 5), "sum has 2 dimensions"),
    ("sumsq", lambda x: np.zeros(2), "sumsq_out has 2 elements; give 1"),
    ("sumsq", lambda x: x.astype(F32), "sumsq_out has dtype float32"),
  ],
)
def test_faulty_arrays_are_named(field, change, match):
  state = state_of(
    Layout(BF16, None, True), 10, with_sum=True, with_squares=True
  )
  faulty = dataclasses.replace(state, **{field: change(getattr(state, field))})
  before = [x.tobytes() for x in state.arrays()]
  with Pool(1) as pool, pytest.raises(ValueError, match=match):
    pool.adamw_step([faulty.segment()], SCALARS, 1.0)
  assert before == [x.tobytes() for x in state.arrays()]


def test_high_halves_need_low_ones():
  state = state_of(Layout(BF16, None, True), 10)
  state.p_low = None
  match = "p_inout has dtype bfloat16; give float32"
  with Pool(1) as pool, pytest.raises(ValueError, match=match):
    pool.adamw_step([state.segment()], SCALARS, 1.0)


@pytest.mark.parametrize(
  "first, second",
  [
    *itertools.combinations(
      ("p", "mu", "nu", "grad", "p_low", "sum", "sumsq"), 2
    )
  ],
)
def test_arrays_may_not_share_bytes_if_one_is_written(first, second):
  state = state_of(
    Layout(BF16, None, True), 16, with_sum=True, with_squares=True
  )
  block = np.zeros(200, np.uint8)
  start = 0
  for field in (first, second):
    array = getattr(state, field)
    setattr(state, field, block[start : start + array.nbytes].view(array.dtype))
    start = array.nbytes - 1
  with Pool(1) as pool:
    if {first, second} == {"grad", "sum"}:
      pool.adamw_step([state.segment()], SCALARS, 1.0)
      return
    with pytest.raises(ValueError, match="overlap by 1 bytes"):
      pool.adamw_step([state.segment()], SCALARS, 1.0)
  assert not block.any()


@pytest.mark.parametrize("field", ["p", "mu", "nu", "p_low", "sumsq"])
def test_what_is_written_may_not_be_read_only(field):
  state = state_of(
    Layout(BF16, None, True), 10, with_sum=True, with_squares=True
  )
  for name in ("grad", "sum", field):
    getattr(state, name).flags.writeable = False
  with Pool(1) as pool, pytest.raises(ValueError, match=f"{field}.*read-only"):
    pool.adamw_step([state.segment()], SCALARS, 1.0)
