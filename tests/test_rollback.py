"""Steps that are recorded, undone and taken again.

Oracles: the NumPy twins for the bits of states and records, the state before
for undoing, which has to come back bit by bit whatever it was.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from sojax.host.kernels import Pool
from sojax.host.operations import (
  Redo,
  Undo,
)
from sojax.plan.adamw import adam_scalars, adamw
from tests.kernel_cases import (
  BF16,
  F16,
  F32,
  GRAD_SCALE,
  LAYOUTS,
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
from tests.rollback_cases import (
  CHUNK,
  NEW_SCALE,
  NO_DECAY,
  assert_record_is_the_twins,
  check,
  every_form,
  record_for,
  state_bytes,
  take,
)

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
