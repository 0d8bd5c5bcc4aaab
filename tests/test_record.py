"""Records: what they have room for, and how they may be used.

Oracles: the NumPy twins, and the state before.
"""

import numpy as np
import pytest

from sojax.host.kernels import Pool
from sojax.host.operations import (
  AdamwStep,
  Finish,
  Narrow,
  Redo,
  Undo,
)
from sojax.host.record import new_record
from sojax.host.segments import NarrowSegment
from sojax.plan import records
from tests.kernel_cases import (
  BF16,
  F16,
  F32,
  GRAD_SCALE,
  ROUND,
  SCALARS,
  Layout,
  assert_same_state,
  every_isa,
  random_state,
  state_of,
)
from tests.rollback_cases import (
  CHUNK,
  NEW_SCALE,
  every_form,
  record_for,
  state_bytes,
  take,
)

# A cap that is hit.


def capped_states():
  states = [
    random_state(5 * CHUNK + 100, F32, F32, seed=0, with_squares=True),
    state_of(Layout(BF16, None, True), 3 * CHUNK, seed=1, with_squares=True),
  ]
  for state in states:
    # Calm enough for few escapes.
    state.nu[:] = 1e-4
    state.grad[:] = state.grad.astype(F32) * F32.type(1e-2)
  states[0].grad[2 * CHUNK :] *= 1000
  return states


@every_isa
@every_form
@pytest.mark.parametrize("num_threads", [1, 2])
def test_chunks_that_do_not_fit_are_left_out(isa, form, num_threads):
  originals = capped_states()
  states = [x.copy() for x in originals]
  stepped = [x.twin() for x in originals]
  with Pool(num_threads, isa=isa) as pool:
    record = record_for(states, form, cap=0.3)
    segments = take(pool, states, record)
    left_out = record.offsets[:-1] == -1
    assert 0 < left_out.sum() < left_out.size
    assert record.num_left_out() == left_out.sum()
    if num_threads == 1:
      assert not left_out[:2].any() and left_out[2:].all()
    chunk = 0
    for state, original, twin in zip(states, originals, stepped, strict=True):
      for start in range(0, state.p.size, CHUNK):
        at = slice(start, start + CHUNK)
        expected = original if left_out[chunk] else twin
        for name in ("p", "mu", "nu", "p_low"):
          x, y = getattr(state, name), getattr(expected, name)
          if y is not None:
            assert x[at].tobytes() == y[at].tobytes()
        chunk += 1
      # All gradients count, stepped or not.
      assert state.sumsq.tobytes() == twin.sumsq.tobytes()

    saved = [x.copy() for x in states], record_arrays(record)
    # Committed: what was left out is stepped.
    pool.submit(Finish(segments, record)).wait()
    for state, twin in zip(states, stepped, strict=True):
      assert_same_state(state, twin)

    restore(states, record, *saved)
    pool.submit(Undo(segments, record)).wait()
    for state, original in zip(states, originals, strict=True):
      assert state_bytes(state) == state_bytes(original)

    restore(states, record, *saved)
    pool.submit(Redo(segments, record, NEW_SCALE)).wait()
    for state, original in zip(states, originals, strict=True):
      assert_same_state(state, original.twin(grad_scale=NEW_SCALE))


def record_arrays(record):
  return (
    record.codes.copy(),
    record.escapes.copy(),
    record.offsets.copy(),
    record.taken,
  )


def restore(states, record, saved_states, saved_record):
  for state, saved in zip(states, saved_states, strict=True):
    for x, y in zip(state.arrays(), saved.arrays(), strict=True):
      x[:] = y
  record.codes[:], record.escapes[:], record.offsets[:], taken = saved_record
  record.taken = taken


@every_isa
def test_without_room_for_any_escape_the_step_comes_at_the_end(isa):
  original = random_state(CHUNK + 5, BF16, BF16)
  original.grad[0] = 1e30
  original.grad[CHUNK] = 1e30
  state = original.copy()
  with Pool(1, isa=isa) as pool:
    record = record_for([state], 3, cap=0)
    segments = take(pool, [state], record)
    assert record.num_left_out() == 2 and record.num_escapes() == 0
    assert state_bytes(state) == state_bytes(original)
    pool.submit(Finish(segments, record)).wait()
  assert_same_state(state, original.twin())


def test_a_record_that_is_exactly_full_is_not_too_full():
  original = random_state(1000)
  original.grad *= 1000
  with Pool(1) as pool:
    state = original.copy()
    record = record_for([state], 3)
    segments = take(pool, [state], record)
    num_escapes = record.num_escapes()
    pool.submit(Undo(segments, record)).wait()
    for room, num_left_out in ((num_escapes, 0), (num_escapes - 1, 1)):
      record.escapes = np.zeros(room, F32)
      take(pool, [state], record)
      assert record.num_left_out() == num_left_out
      pool.submit(Undo(segments, record)).wait()
      assert state_bytes(state) == state_bytes(original)


# Weights.


@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16], ids=str)
def test_undoing_leaves_weights_to_a_narrow(weight_dtype):
  original = random_state(1001, F32, weight_dtype)
  state = original.copy()
  record = record_for([state], 3)
  with Pool(2) as pool:
    segments = take(pool, [state], record)
    stepped = state.weight.copy()
    pool.submit(Undo(segments, record)).wait()
    assert state.weight.tobytes() == stepped.tobytes()
    pool.submit(Narrow([NarrowSegment(state.p, state.weight)])).wait()
  words = np.dtype(f"u{weight_dtype.itemsize}")
  np.testing.assert_array_equal(
    state.weight.view(words), ROUND[weight_dtype](original.p).view(words)
  )


def test_recording_and_finishing_is_a_plain_step():
  original = random_state(70_001, BF16, BF16)
  state, plain = original.copy(), original.copy()
  with Pool(2) as pool:
    record = record_for([state], 2, cap=0.5)
    segments = take(pool, [state], record)
    pool.submit(Finish(segments, record)).wait()
    pool.submit(AdamwStep([plain.segment()], SCALARS, GRAD_SCALE)).wait()
  assert_same_state(state, plain)


# Misuse.


def test_a_record_is_filled_and_used_up_in_turn():
  state = random_state(10)
  segments = [state.segment()]
  with Pool(1) as pool:
    record = record_for([state], 3)
    for operation in (
      Finish(segments, record),
      Undo(segments, record),
      Redo(segments, record, 1.0),
    ):
      with pytest.raises(ValueError, match="holds no step"):
        pool.submit(operation)
    take(pool, [state], record)
    with pytest.raises(ValueError, match="holds a step already"):
      take(pool, [state], record)
    with pytest.raises(ValueError, match=r"have \(9,\) elements .* \(10,\)"):
      pool.submit(Undo([random_state(9).segment()], record))
    pool.submit(Undo(segments, record)).wait()
    with pytest.raises(ValueError, match="holds no step"):
      pool.submit(Undo(segments, record))
    take(pool, [state], record)


@pytest.mark.parametrize(
  "change, match",
  [
    (dict(codes=np.zeros(191, np.uint8)), "record.codes has 191 .* give 192"),
    (dict(codes=np.zeros(192, np.int8)), "record.codes has dtype int8"),
    (dict(escapes=np.zeros(30)), "record.escapes has dtype float64"),
    (dict(offsets=np.zeros(3, np.int64)), "record.offsets has 3 .* give 2"),
    (dict(offsets=np.zeros(2, np.int32)), "record.offsets has dtype int32"),
    (dict(bytes_per_param=4), "bytes_per_param=4"),
  ],
)
def test_the_arrays_of_a_record_are_checked(change, match):
  state = random_state(10)
  before = state.copy()
  record = record_for([state], 3)
  for name, value in change.items():
    setattr(record, name, value)
  with Pool(1) as pool, pytest.raises(ValueError, match=match):
    take(pool, [state], record)
  assert record.taken is None
  assert state_bytes(state) == state_bytes(before)


def test_codes_start_at_a_cache_line():
  state = random_state(10)
  record = record_for([state], 3)
  block = np.zeros(400, np.uint8)
  start = -block.ctypes.data % 64 + 8
  record.codes = block[start : start + 192]
  with Pool(1) as pool, pytest.raises(ValueError, match="multiple of 64 bytes"):
    take(pool, [state], record)


def test_a_record_may_not_share_bytes_with_what_it_records():
  state = random_state(16)
  record = record_for([state], 3)
  record.escapes = state.grad[8:]
  match = r"segments\[0\].grad and record.escapes overlap by 32 bytes"
  with Pool(1) as pool, pytest.raises(ValueError, match=match):
    take(pool, [state], record)


@pytest.mark.parametrize(
  "end, match",
  [(-5, "damaged"), (10**9, "damaged"), (3, "too few escapes")],
)
def test_a_damaged_record_is_an_error(end, match):
  state = random_state(1000)
  state.grad *= 1000
  record = record_for([state], 3)
  with Pool(1) as pool:
    segments = take(pool, [state], record)
    assert record.num_escapes() > 3
    record.offsets[-1] = end
    completion = pool.submit(Undo(segments, record))
    for _ in range(2):
      with pytest.raises(RuntimeError, match=match):
        completion.wait()


@pytest.mark.parametrize("bytes_per_param", [0, 1, 4, None])
def test_a_record_has_two_or_three_bytes(bytes_per_param):
  with pytest.raises(ValueError, match="bytes_per_param"):
    new_record([3], bytes_per_param=bytes_per_param)


@pytest.mark.parametrize("cap", [-0.1, 12.1, float("nan")])
def test_the_cap_of_escapes_has_bounds(cap):
  with pytest.raises(ValueError, match="escape_bytes_per_param"):
    new_record([3], escape_bytes_per_param=cap)


def test_the_sizes_of_a_record_are_those_of_the_kernels():
  from sojax import _cpu_ops

  assert records.CHUNK_ELEMS == _cpu_ops.RECORD_CHUNK_ELEMS
  assert records.GROUP_ELEMS == _cpu_ops.RECORD_GROUP_ELEMS
  record = new_record([100, 0, CHUNK + 1])
  assert record.codes.size == 3 * (128 + CHUNK + 64)
  assert record.escapes.size == (100 + CHUNK + 1) // 2 // 4
  assert record.offsets.size == 4
  assert record.codes.ctypes.data % 64 == 0
