"""The AdamW kernels.

Oracles: the NumPy twin (`adamw_float32`) for bits, float64 NumPy and optax for
the meaning, a quadratic search for overlaps.
"""

import ctypes
import ctypes.util
import dataclasses
import itertools
import os
import pathlib
import platform
import subprocess
import sys
import threading

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojax.host import kernels
from sojax.host.kernels import Pool, Segment
from sojax.plan.adamw import AdamScalars, adam_scalars, adamw
from sojax.reference.adamw import (
  adamw_float32,
  adamw_float64,
  round_to_bfloat16,
)

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
ISAS = kernels.cpu_info().isas
U = 2.0**-24  # unit roundoff of float32
SCALARS = adam_scalars(
  adamw(3e-3, b1=0.9, b2=0.95, eps=1e-8, eps_root=1e-10, weight_decay=0.1),
  count=6,
)
GRAD_SCALE = 0.37

every_isa = pytest.mark.parametrize("isa", ISAS)
every_grad = pytest.mark.parametrize("grad_dtype", [F32, BF16], ids=str)
every_weight = pytest.mark.parametrize(
  "weight_dtype", [None, BF16, F32], ids=str
)


@dataclasses.dataclass
class State:
  """Arrays of one segment, with sentinels around each if it is guarded."""

  p: np.ndarray
  mu: np.ndarray
  nu: np.ndarray
  grad: np.ndarray
  weight: np.ndarray | None

  def segment(self):
    return Segment(self.p, self.mu, self.nu, self.grad, self.weight)

  def arrays(self):
    arrays = (self.p, self.mu, self.nu, self.grad, self.weight)
    return [x for x in arrays if x is not None]

  def twin(self, scalars=SCALARS, grad_scale=GRAD_SCALE):
    """The state after a step of the NumPy twin."""
    p, mu, nu = adamw_float32(
      self.p, self.mu, self.nu, self.grad, scalars, grad_scale
    )
    weight = self.weight
    if weight is not None:
      weight = round_to_bfloat16(p) if weight.dtype == BF16 else p
    return State(p, mu, nu, self.grad.copy(), weight)

  def copy(self):
    arrays = dataclasses.astuple(self)
    return State(*(None if x is None else x.copy() for x in arrays))


def random_state(n, grad_dtype=F32, weight_dtype=None, seed=0):
  rng = np.random.default_rng(seed)
  return State(
    p=rng.standard_normal(n, F32),
    mu=rng.standard_normal(n, F32) * F32.type(1e-2),
    nu=rng.standard_normal(n, F32) ** 2 * F32.type(1e-4),
    grad=rng.standard_normal(n, F32).astype(grad_dtype),
    weight=None if weight_dtype is None else np.zeros(n, weight_dtype),
  )


_GUARD_BYTES = 256
_SENTINEL = 0xA5


def guarded(values, offset_bytes):
  """Copies values between sentinels, `offset_bytes` past a cache line.

  Returns the copy and a function that checks the sentinels.
  """
  num_bytes = values.nbytes
  block = np.full(num_bytes + 3 * _GUARD_BYTES, _SENTINEL, np.uint8)
  start = -block.ctypes.data % 64 + 128 + offset_bytes
  copy = block[start : start + num_bytes].view(values.dtype)
  copy[:] = values

  def check():
    assert np.all(block[:start] == _SENTINEL)
    assert np.all(block[start + num_bytes :] == _SENTINEL)

  return copy, check


def guarded_state(state, offsets_bytes):
  """Puts every array between sentinels; returns a check of all of them."""
  fields, checks = {}, []
  for field, offset in zip(
    dataclasses.fields(state), offsets_bytes, strict=True
  ):
    values = getattr(state, field.name)
    if values is not None:
      values, check = guarded(values, offset)
      checks.append(check)
    fields[field.name] = values
  return State(**fields), lambda: [check() for check in checks]


def assert_same_floats(actual, expected):
  """Every bit, except that a NaN equals any other."""
  assert actual.dtype == expected.dtype == F32
  np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
  numbers = ~np.isnan(expected)
  np.testing.assert_array_equal(
    actual[numbers].view(np.uint32), expected[numbers].view(np.uint32)
  )


def assert_same_state(actual, expected):
  for name in ("p", "mu", "nu"):
    assert_same_floats(getattr(actual, name), getattr(expected, name))
  assert actual.grad.tobytes() == expected.grad.tobytes()
  if expected.weight is None:
    assert actual.weight is None
  elif expected.weight.dtype == BF16:
    assert actual.weight.dtype == BF16
    np.testing.assert_array_equal(
      actual.weight.view(np.uint16), expected.weight.view(np.uint16)
    )
  else:
    assert_same_floats(actual.weight, expected.weight)


# Bits.


@every_isa
@every_grad
@every_weight
def test_every_short_length_has_the_twins_bits_and_keeps_its_neighbours(
  isa, grad_dtype, weight_dtype
):
  with Pool(1, isa=isa) as pool:
    # Far past twice the 32 elements of one turn of the main loop.
    for n in [*range(258), 4099]:
      state = random_state(n, grad_dtype, weight_dtype, seed=n)
      expected = state.twin()
      # Every address, odd bytes included, turns up for some array.
      offsets = [(n * step) % 64 for step in (1, 3, 5, 7, 11)]
      state, check_guards = guarded_state(state, offsets)
      pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)
      assert_same_state(state, expected)
      check_guards()


@every_isa
@pytest.mark.parametrize("weight_dtype", [BF16, F32], ids=str)
def test_alignment_of_the_weights_does_not_matter(isa, weight_dtype):
  original = random_state(3 * 32 + 5, BF16, weight_dtype)
  expected = original.twin()
  with Pool(1, isa=isa) as pool:
    for offset in range(64):
      for n in (1, 7, 31, original.p.size):
        part = State(*(x[:n] for x in dataclasses.astuple(original)))
        state, check_guards = guarded_state(part, [0, 4, 8, 2, offset])
        pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)
        assert_same_state(
          state, State(*(x[:n] for x in dataclasses.astuple(expected)))
        )
        check_guards()


@every_isa
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_and_cuts_do_not_change_bits(isa, num_threads):
  n = 200_003 if isa != "scalar" else 70_001
  original = random_state(n, BF16, BF16)
  expected = original.twin()
  rng = np.random.default_rng(1)
  with Pool(num_threads, isa=isa) as pool:
    for num_cuts in (0, 1, 20):
      state = original.copy()
      cuts = np.sort(rng.integers(0, n, num_cuts))
      parts = zip(*(np.split(x, cuts) for x in state.arrays()), strict=True)
      pool.adamw_step([Segment(*x) for x in parts], SCALARS, GRAD_SCALE)
      assert_same_state(state, expected)


def test_segments_of_different_types_share_a_call():
  states = [
    random_state(n, grad_dtype, weight_dtype, seed=n)
    for n, (grad_dtype, weight_dtype) in enumerate(
      itertools.product([F32, BF16], [None, BF16, F32]), start=70
    )
  ]
  expected = [state.twin() for state in states]
  with Pool(2) as pool:
    pool.adamw_step([x.segment() for x in states], SCALARS, GRAD_SCALE)
  for state, twin in zip(states, expected, strict=True):
    assert_same_state(state, twin)


@every_isa
def test_nothing_to_do_is_fine(isa):
  empty = random_state(0, BF16, BF16)
  with Pool(2, isa=isa) as pool:
    pool.adamw_step([], SCALARS, 1.0)
    pool.adamw_step([empty.segment(), empty.segment()], SCALARS, 1.0)


_FLOAT_MAX = float(np.finfo(F32).max)
_FLOAT_MIN = float(np.finfo(F32).tiny)
_SPECIAL = [
  *(0.0, 1.0, 1e-3, 1e20, 3e38, _FLOAT_MAX, np.inf),
  # Subnormal: the smallest, the largest, and one between.
  *(2.0**-149, _FLOAT_MIN - 2.0**-149, 1e-40),
  *(_FLOAT_MIN, 1e-30, np.nan),
]
SPECIAL = np.array([*_SPECIAL, *(-x for x in _SPECIAL)], F32)

HYPERS = {
  "usual": adamw(3e-3, b2=0.95, weight_decay=0.1),
  "eps_root": adamw(1e-3, eps=0.0, eps_root=1e-8, weight_decay=0.0),
  "no moments": adamw(1e-2, b1=0.0, b2=0.0),
  "all decay": adamw(1.0, weight_decay=1.0),
  "lr 0": adamw(0.0, weight_decay=0.1),
  "eps 1e-45": adamw(1e-3, eps=1e-45),
}


@every_isa
@every_grad
@pytest.mark.parametrize("hyper", HYPERS.values(), ids=HYPERS.keys())
def test_special_values_have_the_twins_bits(isa, grad_dtype, hyper):
  # 26^3 combinations of mu, nu and grad, then of p.
  p, mu, nu, grad = (
    x.ravel()
    for x in np.meshgrid(SPECIAL[::5], SPECIAL, SPECIAL, SPECIAL, copy=True)
  )
  with np.errstate(all="ignore"):
    grad = grad.astype(grad_dtype)
  state = State(p, mu, nu, grad, np.zeros(p.size, BF16))
  scalars = adam_scalars(hyper, count=0)
  expected = state.twin(scalars, 1.0)
  with Pool(1, isa=isa) as pool:
    pool.adamw_step([state.segment()], scalars, 1.0)
  assert_same_state(state, expected)


@every_isa
@every_grad
def test_random_bit_patterns_have_the_twins_bits(isa, grad_dtype):
  rng = np.random.default_rng(2)
  n = 1 << 16

  def bits(dtype):
    return np.frombuffer(rng.bytes(n * dtype.itemsize), dtype).copy()

  state = State(bits(F32), bits(F32), bits(F32), bits(grad_dtype), bits(BF16))
  state.nu[: n // 2] = np.abs(state.nu[: n // 2])
  expected = state.twin()
  with Pool(1, isa=isa) as pool:
    pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)
  assert_same_state(state, expected)


@every_isa
def test_weights_round_to_nearest_with_ties_away_from_zero(isa):
  # Hand-worked: bits of the master, bits of the weight.
  rows = [
    (0x3F800000, 0x3F80),  # 1 stays
    (0x3F807FFF, 0x3F80),  # below the tie
    (0x3F808000, 0x3F81),  # the tie
    (0x3F818000, 0x3F82),  # the tie above an odd weight
    (0xBF808000, 0xBF81),  # the tie, negative
    (0x7F7FFFFF, 0x7F80),  # the largest float becomes infinity
    (0x00008000, 0x0001),  # subnormal
    (0x7F800001, 0x7FC0),  # every NaN
    (0xFFFFFFFF, 0x7FC0),
  ]
  masters, weights = (np.array(x) for x in zip(*rows, strict=True))
  p = masters.astype(np.uint32).view(F32)
  zeros = np.zeros_like(p)
  state = State(p, zeros, zeros.copy(), zeros.copy(), np.zeros(p.size, BF16))
  scalars = adam_scalars(adamw(0.0, weight_decay=0.0), count=0)
  with Pool(1, isa=isa) as pool:
    pool.adamw_step([state.segment()], scalars, 1.0)
  np.testing.assert_array_equal(state.weight.view(np.uint16), weights)


# The floating-point environment.


class _FpMode:
  """Flushes subnormals to zero in this thread, through libm's fenv_t."""

  def __init__(self):
    self._libm = ctypes.CDLL(ctypes.util.find_library("m"))
    # Where the control word is in fenv_t, and its two flush bits.
    self._index, self._flush = {
      "x86_64": (7, 0x8040),  # MXCSR: FTZ and DAZ
      "aarch64": (0, 1 << 24),  # FPCR: FZ
    }[platform.machine()]
    self._saved = self._read()

  def _read(self):
    words = (ctypes.c_uint32 * 16)()
    self._libm.fegetenv(words)
    return words

  def flushes(self):
    return bool(self._read()[self._index] & self._flush)

  def __enter__(self):
    words = self._read()
    words[self._index] |= self._flush
    self._libm.fesetenv(words)
    return self

  def __exit__(self, *exc_info):
    self._libm.fesetenv(self._saved)


@every_isa
def test_subnormals_survive_a_caller_that_flushes_them(isa):
  state = random_state(1001, F32, F32)
  state.p *= F32.type(1e-38)
  state.mu *= F32.type(1e-38)
  state.nu *= F32.type(1e-38)
  state.grad *= F32.type(1e-38)
  scalars = adam_scalars(adamw(1e-3, eps=1e-38), count=0)
  expected = state.twin(scalars, 1.0)
  assert np.any((expected.mu != 0) & (np.abs(expected.mu) < _FLOAT_MIN))
  with _FpMode() as mode:
    # Threads start with the mode of the one that makes them.
    with Pool(1, isa=isa) as pool:
      pool.adamw_step([state.segment()], scalars, 1.0)
    assert mode.flushes()
  assert not mode.flushes()
  assert_same_state(state, expected)


# Meaning.


def float64_step(state, hyper, count, grad_scale):
  """The float64 step and how far float32 may be from it, for p, mu and nu.

  Each rounding to float32 is within U of the exact value, relative. Counting
  them along Numerics 1, where a scalar brings one for its own rounding:
    g: 1 (grad_scale) + 1 (product).
    mu: b1 * mu has 1; gm = (1-b1) * g has 1 + 2 + 1; their sum 1 more.
    nu: (1-b2) * (g * g) has 1 + 2 * 2 + 1 + 1; the sum of positive terms is
      within the larger of them and 1 more: 8.
    fma(sqrt(nu + r), k, eps): (8 + 1) / 2 + 1 + 1 (k) + 1.
    u: that, 1 + 1 + 1 (quotient, s, product), and the error of mu.
    p: d in p * d, one for p * d + u, one for the sum.
  """
  p, mu, nu = adamw_float64(
    state.p,
    state.mu,
    state.nu,
    state.grad,
    count=count,
    learning_rate=hyper.learning_rate,
    b1=hyper.b1,
    b2=hyper.b2,
    eps=hyper.eps,
    eps_root=hyper.eps_root,
    weight_decay=hyper.weight_decay,
    grad_scale=grad_scale,
  )
  g = state.grad.astype(np.float64) * grad_scale
  p_old = state.p.astype(np.float64)
  decay = np.abs(p_old * hyper.learning_rate * hyper.weight_decay)
  change = p - p_old
  u = change + p_old * hyper.learning_rate * hyper.weight_decay
  mu_error = U * (
    np.abs(hyper.b1 * state.mu) + 4 * np.abs((1 - hyper.b1) * g) + np.abs(mu)
  )
  nu_error = U * 8 * nu
  # |u / mu| without a division by a mu of zero.
  t = count + 1
  per_mu = hyper.learning_rate / (1 - hyper.b1**t)
  per_mu /= np.sqrt(nu / (1 - hyper.b2**t) + hyper.eps_root) + hyper.eps
  u_error = np.abs(u) * U * (4.5 + 3 + 3) + per_mu * mu_error
  p_error = u_error + U * (decay + np.abs(change) + np.abs(p))
  # Terms of second order, and underflow.
  slack = [x * (1 + 1e-5) + 2.0**-149 for x in (p_error, mu_error, nu_error)]
  return (p, mu, nu), slack


def assert_within(actual, expected, bound):
  error = np.abs(actual.astype(np.float64) - expected)
  np.testing.assert_array_less(error, bound)


MEANING = {
  "usual": adamw(1e-3, b2=0.999, weight_decay=0.1),
  "paper": adamw(3e-4, b2=0.95, weight_decay=0.1),
  "no decay": adamw(1e-3, weight_decay=0.0),
  "eps_root": adamw(1e-3, eps_root=1e-8),
  "no moments": adamw(1e-3, b1=0.0, b2=0.0),
  "lr 0": adamw(0.0, weight_decay=0.1),
  "little decay": adamw(1e-6, weight_decay=0.1),
}


@pytest.mark.parametrize("count", [0, 1, 10, 100_000])
@pytest.mark.parametrize("hyper", MEANING.values(), ids=MEANING.keys())
def test_a_step_is_within_the_roundings_of_float64(hyper, count):
  state = random_state(20_001, F32, None)
  expected, bounds = float64_step(state, hyper, count, GRAD_SCALE)
  with Pool(2) as pool:
    pool.adamw_step([state.segment()], adam_scalars(hyper, count), GRAD_SCALE)
  for actual, value, bound in zip(
    (state.p, state.mu, state.nu), expected, bounds, strict=True
  ):
    assert_within(actual, value, bound)


@pytest.mark.parametrize("hyper", MEANING.values(), ids=MEANING.keys())
def test_steps_mean_what_optax_means(hyper):
  optimizer = optax.adamw(
    hyper.learning_rate,
    b1=hyper.b1,
    b2=hyper.b2,
    eps=hyper.eps,
    eps_root=hyper.eps_root,
    weight_decay=hyper.weight_decay,
  )
  state = random_state(1003)
  state.mu[:] = 0
  state.nu[:] = 0
  opt_state = optimizer.init(jnp.array(state.p, copy=True))
  rng = np.random.default_rng(3)
  with Pool(1) as pool:
    for count in range(12):
      state.grad[:] = rng.standard_normal(state.grad.size)
      # Both start each step from the same state.
      adam_state = opt_state[0]._replace(
        mu=jnp.array(state.mu, copy=True), nu=jnp.array(state.nu, copy=True)
      )
      updates, opt_state = optimizer.update(
        jnp.array(state.grad, copy=True),
        (adam_state, *opt_state[1:]),
        p_jax := jnp.array(state.p, copy=True),
      )
      optax_p = np.asarray(optax.apply_updates(p_jax, updates))
      (p, _, _), bounds = float64_step(state, hyper, count, 1.0)
      u = np.abs(p - state.p * (1 - hyper.learning_rate * hyper.weight_decay))
      pool.adamw_step([state.segment()], adam_scalars(hyper, count), 1.0)
      # optax rounds in other places but no more often, so that it is within
      # the same bounds of float64; only its bias corrections 1 - b^t come from
      # a rounded b: t * b^t roundings, those of the power (below 4 units) and
      # one of the difference, against 1 - b^t.
      t = count + 1
      bias = [
        ((t + 4) * b**t / (1 - b**t) + 1) * U for b in (hyper.b1, hyper.b2)
      ]
      optax_bound = 2 * bounds[0] + u * (bias[0] + bias[1] / 2)
      assert_within(state.p, optax_p, optax_bound)
      assert_within(state.mu, opt_state[0].mu, 2 * bounds[1])
      assert_within(state.nu, opt_state[0].nu, 2 * bounds[2])


@every_isa
def test_decay_below_one_rounding_is_not_lost(isa):
  # p * (1 - 1e-7) with a rounded factor would decay 19 % too much.
  state = random_state(100_000)
  state.p[:] = np.random.default_rng(4).uniform(1, 2, state.p.size)
  state.mu[:] = 0
  state.grad[:] = 0
  before = state.p.astype(np.float64)
  scalars = adam_scalars(adamw(1e-6, weight_decay=0.1), count=0)
  with Pool(2, isa=isa) as pool:
    pool.adamw_step([state.segment()], scalars, 1.0)
  # The sum is rounded to a grid of 2^-23: half of it, and a little for p * d.
  bound = np.full(before.size, 2.0**-24 + 2.0**-40)
  assert_within(state.p, before * (1 - 1e-7), bound)
  decay = np.mean(before - state.p) / np.mean(before)
  assert decay == pytest.approx(1e-7, rel=0.1)


def test_learning_rate_zero_moves_only_the_moments():
  state = random_state(1001)
  before = state.copy()
  scalars = adam_scalars(adamw(0.0, weight_decay=0.1), count=3)
  with Pool(2) as pool:
    pool.adamw_step([state.segment()], scalars, 1.0)
  assert state.p.tobytes() == before.p.tobytes()
  assert np.all(state.mu != before.mu) and np.all(state.nu != before.nu)


# Arguments.

_FIELDS = ("p_inout", "mu_inout", "nu_inout", "grad", "weight_out")


def strided(array):
  return np.repeat(array, 2)[::2]


def read_only(array):
  array = array.copy()
  array.flags.writeable = False
  return array


def byte_swapped(array):
  return array.astype(array.dtype.newbyteorder(">"))


# What is done to a field, the error, a word of its message.
FAULTS = {
  "float64": (lambda x: x.astype(np.float64), ValueError, "dtype float64"),
  "float16": (lambda x: x.astype(np.float16), ValueError, "dtype float16"),
  "int32": (lambda x: x.astype(np.int32), ValueError, "dtype int32"),
  "bytes": (lambda x: x.view("V2"), ValueError, ""),
  "swapped": (byte_swapped, ValueError, "dtype >f4"),
  "strided": (strided, ValueError, "stride"),
  "reversed": (lambda x: x[::-1], ValueError, "stride"),
  "2-D": (lambda x: x.reshape(1, -1), ValueError, "dimensions"),
  "0-D": (lambda x: np.array(x[0]), ValueError, "dimensions"),
  "short": (lambda x: x[:-1], ValueError, "elements"),
  "empty": (lambda x: x[:0], ValueError, "elements"),
  "list": (lambda x: x.tolist(), TypeError, "list"),
  "scalar": (lambda x: 3.0, TypeError, "float"),
  "jax": (lambda x: jnp.array(x, copy=True), TypeError, "numpy.ndarray"),
}


@pytest.fixture(scope="module")
def pool():
  with Pool(2) as pool:
    yield pool


def faulty_step(pool, states, segments, error, match):
  """The step raises, and no byte of any array changes."""
  before = [x.tobytes() for state in states for x in state.arrays()]
  with pytest.raises(error, match=match):
    pool.adamw_step(segments, SCALARS, 1.0)
  assert before == [x.tobytes() for state in states for x in state.arrays()]


@given(
  field=st.sampled_from(_FIELDS),
  fault=st.sampled_from(sorted(FAULTS)),
  index=st.integers(0, 2),
  n=st.integers(2, 100),
)
def test_a_faulty_array_is_an_error_that_names_it(pool, field, fault, index, n):
  states = [random_state(n, F32, F32, seed=i) for i in range(3)]
  segments = [state.segment() for state in states]
  change, error, word = FAULTS[fault]
  faulty = change(getattr(segments[index], field))
  segments[index] = dataclasses.replace(segments[index], **{field: faulty})
  # A p_inout of another length is reported by the field that differs.
  name = field if field != "p_inout" or word != "elements" else "mu_inout"
  match = rf"segments\[{index}\]\.{name} .*{word}"
  faulty_step(pool, states, segments, error, match)


@pytest.mark.parametrize("field", ["p_inout", "mu_inout", "nu_inout"])
def test_bfloat16_state_is_an_error(pool, field):
  state = random_state(9)
  faulty = {field: getattr(state.segment(), field).astype(BF16)}
  segment = dataclasses.replace(state.segment(), **faulty)
  faulty_step(pool, [state], [segment], ValueError, f"{field}.*bfloat16")


@pytest.mark.parametrize("field", _FIELDS)
def test_only_the_gradient_may_be_read_only(pool, field):
  state = random_state(9, F32, F32)
  segment = state.segment()
  segment = dataclasses.replace(
    segment, **{field: read_only(getattr(segment, field))}
  )
  if field == "grad":
    expected = state.twin()
    pool.adamw_step([segment], SCALARS, GRAD_SCALE)
    assert_same_state(state, expected)
  else:
    faulty_step(pool, [state], [segment], ValueError, f"{field} is read-only")


@st.composite
def layouts(draw):
  """Starts and lengths in bytes of the arrays of up to three segments.

  They lie one after the other in any order, then up to three of them move
  onto others.
  """
  num_segments = draw(st.integers(1, 3))
  elems = draw(
    st.lists(st.integers(0, 9), min_size=num_segments, max_size=num_segments)
  )
  num_bytes = [4 * n for n in elems for _ in _FIELDS]
  starts = [0] * len(num_bytes)
  end = 0
  for i in draw(st.permutations(range(len(num_bytes)))):
    starts[i] = end
    end += num_bytes[i] + draw(st.sampled_from([0, 0, 1, 4]))
  for _ in range(draw(st.integers(0, 3))):
    moved = draw(st.sampled_from(range(len(starts))))
    onto = draw(st.sampled_from(range(len(starts))))
    starts[moved] = max(0, starts[onto] + draw(st.integers(-8, 40)))
  return starts, num_bytes


def step_with_layout(pool, starts, num_bytes):
  """Steps arrays of zeros laid out in one block, if nothing overlaps."""
  block = np.zeros(1000, np.uint8)
  arrays = [
    block[start : start + size].view(F32)
    for start, size in zip(starts, num_bytes, strict=True)
  ]
  segments = [Segment(*arrays[i : i + 5]) for i in range(0, len(arrays), 5)]
  pool.adamw_step(segments, SCALARS, 1.0)


@settings(max_examples=300)
@given(layout=layouts())
def test_overlap_is_an_error_exactly_where_a_written_array_shares_bytes(
  pool, layout
):
  """The oracle compares all pairs of arrays."""
  starts, num_bytes = layout
  is_written = [_FIELDS[i % 5] != "grad" for i in range(len(starts))]
  overlaps = any(
    (is_written[i] or is_written[j])
    and max(starts[i], starts[j])
    < min(starts[i] + num_bytes[i], starts[j] + num_bytes[j])
    for i, j in itertools.combinations(range(len(starts)), 2)
  )
  if overlaps:
    with pytest.raises(ValueError, match="overlap by [0-9]+ bytes"):
      step_with_layout(pool, starts, num_bytes)
  else:
    step_with_layout(pool, starts, num_bytes)


def test_an_overlap_behind_a_nested_gradient_is_found(pool):
  # The second gradient lies in the first, which is fine; what is written
  # after it still overlaps the first, by name and by bytes.
  num_bytes = [40] * 5 + [4] * 5
  starts = [100, 200, 300, 0, 400, 38, 500, 600, 8, 700]
  match = r"segments\[0\]\.grad and segments\[1\]\.p_inout overlap by 2 bytes"
  with pytest.raises(ValueError, match=match):
    step_with_layout(pool, starts, num_bytes)


def test_segments_may_share_a_gradient(pool):
  first = random_state(50, seed=0)
  second = dataclasses.replace(random_state(50, seed=1), grad=first.grad)
  expected = [first.twin(), second.twin()]
  pool.adamw_step([first.segment(), second.segment()], SCALARS, GRAD_SCALE)
  assert_same_state(first, expected[0])
  assert_same_state(second, expected[1])


def test_scalars_are_numbers(pool):
  state = random_state(3)
  scalars = dataclasses.replace(SCALARS, b1="0.9")
  with pytest.raises(TypeError):
    pool.adamw_step([state.segment()], scalars, 1.0)
  with pytest.raises((TypeError, ValueError)):
    pool.adamw_step([state.segment()], SCALARS, "one")


def test_the_scalars_of_the_spec_are_those_of_the_kernel():
  names = [field.name for field in dataclasses.fields(AdamScalars)]
  assert names == ["b1", "b2", "one_minus_b1", "one_minus_b2", *"krsd", "eps"]


# Instruction sets, threads and cores.


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 only")
def test_the_instruction_sets_are_those_of_the_cpu():
  info = kernels.cpu_info()
  text = pathlib.Path("/proc/cpuinfo").read_text()
  flags = set(next(x for x in text.splitlines() if "flags" in x).split())
  expected = []
  if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
    expected.append("avx512")
  if {"avx2", "fma"} <= flags:
    expected.append("avx2")
  assert info.isas == (*expected, "scalar")
  assert info.isa == info.isas[0]
  assert info.cores == len(os.sched_getaffinity(0))


def test_a_pool_says_what_it_uses():
  for isa in ISAS:
    with Pool(1, isa=isa) as pool:
      assert (pool.isa, pool.num_threads, pool.cores) == (isa, 1, None)
  with Pool(2) as pool:
    assert pool.isa == ISAS[0]


@pytest.mark.parametrize("isa", ["sve", "AVX2", "", "best"])
def test_a_missing_instruction_set_is_an_error_that_names_the_others(isa):
  with pytest.raises(ValueError, match=f"isa='{isa}'.*'scalar'"):
    Pool(1, isa=isa)


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_the_number_of_threads_has_bounds(num_threads):
  with pytest.raises(ValueError, match=f"num_threads={num_threads}"):
    Pool(num_threads)


def test_cores_are_checked():
  allowed = sorted(os.sched_getaffinity(0))
  with pytest.raises(ValueError, match="2 cores for 1 threads"):
    Pool(1, cores=(0, 1))
  with pytest.raises(ValueError, match="different"):
    Pool(2, cores=(allowed[0], allowed[0]))
  with pytest.raises(ValueError, match="those of this process"):
    Pool(1, cores=(allowed[-1] + 1,))


def workers():
  """The threads of all pools of this process: their ids."""
  tasks = pathlib.Path("/proc/self/task").iterdir()
  return {
    int(x.name) for x in tasks if (x / "comm").read_text().startswith("sojax-")
  }


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_pools_work_at_once_on_disjoint_cores():
  cores = sorted(os.sched_getaffinity(0))[:2]
  states = [random_state(50_001, BF16, BF16, seed=i) for i in range(2)]
  expected = [state.copy() for state in states]
  others = workers()
  pools = [Pool(1, cores=[core]) for core in cores]
  bound = [os.sched_getaffinity(x) for x in sorted(workers() - others)]
  assert bound == [{core} for core in cores]

  def work(pool, state):
    for _ in range(20):
      pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)

  threads = [
    threading.Thread(target=work, args=args)
    for args in zip(pools, states, strict=True)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for pool in pools:
    pool.close()
  for state, twin in zip(states, expected, strict=True):
    for _ in range(20):
      twin = twin.twin()
    assert_same_state(state, twin)


def test_callers_of_one_pool_take_turns():
  states = [random_state(10_001, seed=i) for i in range(4)]
  expected = [state.twin().twin().twin() for state in states]
  with Pool(2) as pool:

    def work(state):
      for _ in range(3):
        pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)

    threads = [threading.Thread(target=work, args=(x,)) for x in states]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  for state, twin in zip(states, expected, strict=True):
    assert_same_state(state, twin)


def test_another_thread_runs_python_during_a_step():
  state = random_state(1 << 20)
  gate, ran = threading.Lock(), threading.Event()
  gate.acquire()

  def wait_then_run():
    with gate:
      ran.set()

  thread = threading.Thread(target=wait_then_run)
  thread.start()
  interval = sys.getswitchinterval()
  # From here on nobody gets the GIL unless its owner lets go of it.
  sys.setswitchinterval(1000)
  try:
    with Pool(1) as pool:
      gate.release()
      for _ in range(1000):
        pool.adamw_step([state.segment()], SCALARS, 1.0)
        if ran.is_set():
          break
      assert ran.is_set()
  finally:
    sys.setswitchinterval(interval)
  thread.join()


def test_closing_ends_the_threads():
  before = workers()
  pool = Pool(3)
  assert len(workers() - before) == 3
  pool.close()
  assert workers() == before
  pool.close()
  state = random_state(3)
  faulty_step(pool, [state], [state.segment()], ValueError, "closed")
  Pool(2)  # nobody keeps it
  assert workers() == before


def test_a_forked_child_gets_an_error_instead_of_a_hang():
  program = """
import os, numpy as np
from sojax.host.kernels import Pool, Segment
from sojax.plan.adamw import adam_scalars, adamw
pool = Pool(2)
child = os.fork()
if child == 0:
  arrays = [np.zeros(3, np.float32) for _ in range(4)]
  try:
    pool.adamw_step([Segment(*arrays)], adam_scalars(adamw(1e-3), 0), 1.0)
  except RuntimeError as error:
    assert "fork" in str(error)
    pool.close()
    os._exit(7)
  os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
  subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
