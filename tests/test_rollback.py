"""Steps that are recorded, undone and taken again.

Oracles: the NumPy twins for the bits of states and records, the state before
for undoing, which has to come back bit by bit whatever it was.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from sojax.host import record as record_module
from sojax.host.kernels import Pool
from sojax.host.operations import (
  AdamwStep,
  Finish,
  Narrow,
  RecordStep,
  Redo,
  Undo,
)
from sojax.host.record import new_record
from sojax.host.segments import NarrowSegment
from sojax.plan.adamw import adam_scalars, adamw
from sojax.reference.record import record_float32
from tests.kernel_cases import (
  BF16,
  F16,
  F32,
  GRAD_SCALE,
  LAYOUTS,
  ROUND,
  SCALARS,
  SPECIAL,
  FpMode,
  Layout,
  assert_same_state,
  every_isa,
  every_layout,
  guarded_state,
  random_bits,
  random_state,
  state_of,
)

CHUNK = 1 << 14
NEW_SCALE = 0.11
every_form = pytest.mark.parametrize("form", [2, 3])
NO_DECAY = adam_scalars(
  adamw(1e-3, b1=0.9, b2=0.999, weight_decay=0.0), count=1000
)


def state_bytes(state):
  """The bytes of what a step changes, weights aside."""
  arrays = (state.p, state.mu, state.nu, state.p_low)
  return [None if x is None else x.tobytes() for x in arrays]


def record_for(states, form, cap=12):
  """A record with room for everything, full of what must not matter."""
  lengths = [state.p.size for state in states]
  record = new_record(lengths, bytes_per_param=form, escape_bytes_per_param=cap)
  record.codes[:] = 0xEE
  record.escapes[:] = np.nan
  record.offsets[:] = 12345
  return record


def take(pool, states, record, scalars=SCALARS, grad_scale=GRAD_SCALE):
  """Takes and records the step of these states. Returns their segments."""
  segments = [state.segment() for state in states]
  pool.submit(RecordStep(segments, scalars, grad_scale, record)).wait()
  return segments


def assert_record_is_the_twins(record, states, scalars, grad_scale):
  """Codes and escapes of all chunks of the states before the step."""
  codes, chunk = [], 0
  for state in states:
    p, mu, nu = state.masters()
    for start in range(0, p.size, CHUNK):
      at = slice(start, start + CHUNK)
      twin = record_float32(
        (p[at], mu[at], nu[at]),
        state.whole_grad()[at],
        scalars,
        grad_scale,
        record.bytes_per_param,
      )
      codes.append(twin.codes)
      first = record.offsets[chunk]
      escapes = record.escapes[first : first + twin.escapes.size]
      assert escapes.tobytes() == twin.escapes.tobytes()
      chunk += 1
  if codes:
    np.testing.assert_array_equal(record.codes, np.concatenate(codes))


def check(pool, original, form, scalars=SCALARS, grad_scale=GRAD_SCALE):
  """All that rollback promises, of one state. Returns the escapes.

  With room for all escapes.
  """
  state = original.copy()
  record = record_for([state], form)
  segments = take(pool, [state], record, scalars, grad_scale)
  assert_same_state(state, original.twin(scalars, grad_scale))
  assert record.num_left_out() == 0
  assert_record_is_the_twins(record, [original], scalars, grad_scale)
  pool.submit(Undo(segments, record)).wait()
  assert state_bytes(state) == state_bytes(original)

  take(pool, [state], record, scalars, grad_scale)
  num_escapes = record.num_escapes()
  pool.submit(Redo(segments, record, NEW_SCALE)).wait()
  assert_same_state(state, original.twin(scalars, NEW_SCALE))
  return num_escapes


# Lengths, types, threads.


@every_isa
@every_layout
@every_form
def test_every_short_length_comes_back(isa, layout, form):
  with Pool(1, isa=isa) as pool:
    for n in range(131):
      original = state_of(
        layout, n, n, with_sum=n % 3 == 0, with_squares=n % 2 == 0
      )
      offsets = [(n * step) % 64 for step in (1, 3, 5, 7, 11, 13, 17, 19)]
      original, check_guards = guarded_state(original, offsets)
      before = original.copy()
      record = record_for([original], form)
      segments = take(pool, [original], record)
      assert_same_state(original, before.twin())
      check_guards()
      assert_record_is_the_twins(record, [before], SCALARS, GRAD_SCALE)
      pool.submit(Undo(segments, record)).wait()
      assert state_bytes(original) == state_bytes(before)
      check_guards()
      take(pool, [original], record)
      pool.submit(Redo(segments, record, NEW_SCALE)).wait()
      assert_same_state(original, before.twin(grad_scale=NEW_SCALE))
      check_guards()


@every_isa
@every_layout
@every_form
def test_large_odd_lengths_come_back(isa, layout, form):
  with Pool(1, isa=isa) as pool:
    for n in (4097, 2 * CHUNK + 3 * 64 + 17):
      check(pool, state_of(layout, n, with_sum=True, with_squares=True), form)


@every_isa
@every_form
def test_the_arrays_of_a_record_are_not_overrun(isa, form):
  with Pool(1, isa=isa) as pool:
    for n in [*range(0, 131, 13), CHUNK + 65]:
      states = [random_state(n, seed=n)]
      # Every value escapes.
      scalars = adam_scalars(adamw(1e-3, b1=0.0, b2=0.0), count=0)
      record = record_for(states, form)
      blocks = []
      for name in ("codes", "escapes", "offsets"):
        array = getattr(record, name)
        block = np.full(array.nbytes + 256, 0xA5, np.uint8)
        start = -block.ctypes.data % 64 + 64
        inside = block[start : start + array.nbytes].view(array.dtype)
        setattr(record, name, inside)
        blocks.append((block, start, start + array.nbytes))
      before = states[0].copy()
      segments = take(pool, states, record, scalars)
      pool.submit(Undo(segments, record)).wait()
      assert state_bytes(states[0]) == state_bytes(before)
      for block, start, end in blocks:
        assert np.all(block[:start] == 0xA5) and np.all(block[end:] == 0xA5)


@every_isa
@every_form
def test_what_one_thread_records_others_undo(isa, form):
  lengths = (0, 5, 3 * CHUNK + 1, 64, CHUNK, 7 * CHUNK - 1)
  states = [
    state_of(layout, n, seed=n)
    for n, layout in zip(lengths, LAYOUTS, strict=False)
  ]
  for state in states:
    state.grad[::97] *= 50
  before = [state.copy() for state in states]
  with Pool(1, isa=isa) as one, Pool(3, isa=isa) as three:
    for recorder, undoer in itertools.product((one, three), repeat=2):
      record = record_for(states, form)
      segments = take(recorder, states, record)
      for state, original in zip(states, before, strict=True):
        assert_same_state(state, original.twin())
      assert_record_is_the_twins(record, before, SCALARS, GRAD_SCALE)
      undoer.submit(Undo(segments, record)).wait()
      for state, original in zip(states, before, strict=True):
        assert state_bytes(state) == state_bytes(original)
  # That there was something to escape.
  assert record.num_escapes() > 100


@every_form
def test_what_one_instruction_set_records_another_undoes(form):
  isas = ["scalar", *dict.fromkeys([Pool(1).isa])]
  original = random_state(CHUNK + 77, BF16, BF16)
  original.grad[::31] *= 1000
  state = original.copy()
  for recorder, undoer in itertools.product(isas, repeat=2):
    record = record_for([state], form)
    with Pool(1, isa=recorder) as pool:
      segments = take(pool, [state], record)
    with Pool(1, isa=undoer) as pool:
      pool.submit(Undo(segments, record)).wait()
    assert state_bytes(state) == state_bytes(original)


# Hyper-parameters and values.

HYPERS = {
  "b2 0.95": adamw(3e-3, b2=0.95, weight_decay=0.1),
  "b2 0.999": adamw(1e-3, b2=0.999, weight_decay=0.0),
  "eps_root": adamw(1e-3, eps_root=1e-8, weight_decay=0.1),
  "lr 0": adamw(0.0, weight_decay=0.1),
  "all decay": adamw(1.0, weight_decay=1.0),
  "no moments": adamw(1e-2, b1=0.0, b2=0.0),
  "little decay": adamw(1e-6, weight_decay=0.1),
}
every_hyper = pytest.mark.parametrize(
  "hyper", HYPERS.values(), ids=HYPERS.keys()
)
SOME_LAYOUTS = [
  Layout(F32),
  Layout(BF16, BF16),
  Layout(F16, F16),
  Layout(F32, None, True),
  Layout(BF16, None, True),
]
some_layouts = pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=str)


@every_isa
@some_layouts
@every_form
@every_hyper
def test_steps_of_every_kind_come_back(isa, layout, form, hyper):
  with Pool(1, isa=isa) as pool:
    for count in (0, 1, 1000):
      original = state_of(layout, 2003, seed=count)
      check(pool, original, form, adam_scalars(hyper, count))


@every_isa
@some_layouts
@every_form
@every_hyper
def test_the_first_step_comes_back(isa, layout, form, hyper):
  original = state_of(layout, 2003)
  original.mu[:] = 0
  original.nu[:] = 0
  with Pool(1, isa=isa) as pool:
    num_escapes = check(pool, original, form, adam_scalars(hyper, 0))
  if hyper.b1 != 0 and hyper.learning_rate * hyper.weight_decay != 1:
    # Zeros need no special case: only p can be off.
    assert num_escapes < original.mu.size / (50 if form == 3 else 2)


@every_isa
@some_layouts
@every_form
@pytest.mark.parametrize("factor", [10.0, 50.0, 1e3, 1e6])
def test_spikes_come_back(isa, layout, form, factor):
  original = state_of(layout, 5003)
  with np.errstate(over="ignore"):
    original.grad = (original.grad.astype(F32) * F32.type(factor)).astype(
      layout.grad
    )
  with Pool(1, isa=isa) as pool:
    num_escapes = check(pool, original, form, grad_scale=1.0)
  assert factor < 1e3 or num_escapes > original.mu.size


@every_isa
@some_layouts
@every_form
@pytest.mark.parametrize(
  "value", [0.0, -0.0, 1e-40, np.inf, -np.inf, np.nan, 1e20, 3e38], ids=str
)
def test_gradients_of_one_value_come_back(isa, layout, form, value):
  original = state_of(layout, 1003)
  with np.errstate(over="ignore"):
    original.grad[:] = F32.type(value)
  with Pool(1, isa=isa) as pool:
    num_escapes = check(pool, original, form, grad_scale=1.0)
  if np.isnan(value):
    # The worst that can be: every estimate is the largest float.
    assert num_escapes == 3 * original.mu.size


@every_isa
@every_form
@pytest.mark.parametrize("split", [False, True])
@every_hyper
def test_special_states_come_back(isa, form, split, hyper):
  nans = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0xFF80FFFF], np.uint32)
  values = np.concatenate([SPECIAL, nans.view(F32)])
  p, mu, nu, grad = (
    x.ravel()
    for x in np.meshgrid(values[::2], values, values, SPECIAL[::3], copy=True)
  )
  original = dataclasses.replace(random_state(0), p=p, mu=mu, nu=nu, grad=grad)
  if split:
    bits = np.ascontiguousarray(p).view(np.uint32)
    original.p = ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16).view(BF16)
    original.p_low = bits.astype(np.uint16).view(np.int16)
  with Pool(2, isa=isa) as pool:
    check(pool, original, form, adam_scalars(hyper, 3), 1.0)


@every_isa
@every_layout
@every_form
def test_random_bits_come_back(isa, layout, form):
  rng = np.random.default_rng(5)
  with Pool(1, isa=isa) as pool:
    for with_sum in (False, True):
      original = state_of(layout, 20_011, with_sum=with_sum)
      original = original.map(lambda x: random_bits(rng, x))
      check(pool, original, form)


@every_isa
@every_form
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_subnormals_come_back_under_a_caller_that_flushes_them(
  isa, form, dtype
):
  original = random_state(3003, F32)
  for name in ("p", "mu", "nu", "grad"):
    array = getattr(original, name)
    setattr(original, name, array * F32.type(1e-38))
  original.grad = original.grad.astype(dtype)
  scalars = adam_scalars(adamw(1e-38, eps=1e-38), count=2)
  state = original.copy()
  expected = original.twin(scalars, 1.0)
  expected_again = original.twin(scalars, 0.5)
  with FpMode() as mode:
    with Pool(1, isa=isa) as pool:
      record = record_for([state], form)
      segments = take(pool, [state], record, scalars, 1.0)
      after = state.copy()
      pool.submit(Undo(segments, record)).wait()
      back = state.copy()
      take(pool, [state], record, scalars, 1.0)
      pool.submit(Redo(segments, record, 0.5)).wait()
    assert mode.flushes()
  assert_same_state(after, expected)
  assert state_bytes(back) == state_bytes(original)
  assert_same_state(state, expected_again)


# What does not escape, and what does.


def test_usual_steps_escape_seldom():
  original = random_state(1 << 20)
  # As after many steps: moments that fit to the gradients, of 1e-2.
  original.p *= F32.type(0.05)
  original.mu *= F32.type(0.2)
  original.nu[:] = 1e-4
  original.grad *= F32.type(1e-2)
  state = original.copy()
  with Pool(2) as pool:
    for form, most in ((3, 1e-3), (2, 2e-2)):
      record = record_for([state], form)
      segments = take(pool, [state], record, NO_DECAY, 1.0)
      assert record.num_escapes() / (3 * state.p.size) < most
      pool.submit(Undo(segments, record)).wait()
      assert state_bytes(state) == state_bytes(original)


@every_isa
@every_form
def test_codes_next_to_their_limits_come_back(isa, form):
  # Gradients of all sizes leave errors of all sizes in the estimates.
  limit = {3: 127, 2: 7}[form]
  rng = np.random.default_rng(8)
  n = 200_000
  original = random_state(n)
  original.grad = (
    rng.standard_normal(n) * np.exp2(rng.uniform(-8, 12, n))
  ).astype(F32)
  with Pool(2, isa=isa) as pool:
    state = original.copy()
    record = record_for([state], form)
    segments = take(pool, [state], record)
    codes = stored_nu_codes(record)
    for code in (-limit - 1, -limit, -limit + 1, limit - 1, limit):
      assert np.any(codes == code)
    assert codes.min() == -limit - 1 and codes.max() == limit
    pool.submit(Undo(segments, record)).wait()
    assert state_bytes(state) == state_bytes(original)


def stored_nu_codes(record):
  """The codes of nu, int8."""
  groups = record.codes.reshape(-1, 64 * record.bytes_per_param)
  if record.bytes_per_param == 3:
    return groups[:, 64:128].view(np.int8)
  stored = groups[:, 64:96]
  nibbles = np.stack([stored & 0xF, stored >> 4], axis=2)
  return ((nibbles ^ 8) - 8).view(np.int8)


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

  assert record_module._CHUNK_ELEMS == _cpu_ops.RECORD_CHUNK_ELEMS
  assert record_module._GROUP_ELEMS == _cpu_ops.RECORD_GROUP_ELEMS
  record = new_record([100, 0, CHUNK + 1])
  assert record.codes.size == 3 * (128 + CHUNK + 64)
  assert record.escapes.size == (100 + CHUNK + 1) // 2 // 4
  assert record.offsets.size == 4
  assert record.codes.ctypes.data % 64 == 0
