"""Arrays for tests of the kernels, and how to compare them."""

import ctypes
import ctypes.util
import dataclasses
import itertools
import platform

import ml_dtypes
import numpy as np
import pytest

from sojax.host import kernels
from sojax.host.kernels import CHUNK_ELEMS
from sojax.host.segments import AccumulateSegment, Segment
from sojax.plan.adamw import adam_scalars, adamw
from sojax.reference.accumulate import (
  accumulate_float32,
  chunk_sums_of_squares,
)
from sojax.reference.adamw import (
  adamw_float32,
  round_to_bfloat16,
  round_to_float16,
)
from sojax.reference.record import join_float32, quiet_nan, split_float32

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)
GRAD_DTYPES = [F32, BF16, F16]
ISAS = kernels.cpu_info().isas
SCALARS = adam_scalars(
  adamw(3e-3, b1=0.9, b2=0.95, eps=1e-8, eps_root=1e-10, weight_decay=0.1),
  count=6,
)
GRAD_SCALE = 0.37

SUM_METHODS = ["widen", "accumulate"]

every_isa = pytest.mark.parametrize("isa", ISAS)
every_grad = pytest.mark.parametrize("grad_dtype", GRAD_DTYPES, ids=str)


ROUND = {F32: np.copy, BF16: round_to_bfloat16, F16: round_to_float16}


@dataclasses.dataclass(frozen=True)
class Layout:
  """The types of a segment: what the kernels can be asked for."""

  grad: np.dtype
  weight: np.dtype | None = None
  split: bool = False

  def __str__(self):
    return f"{self.grad}-{'split' if self.split else self.weight}"


LAYOUTS = [
  *(Layout(F32, weight) for weight in (None, F32, BF16, F16)),
  *(Layout(BF16, weight) for weight in (None, F32, BF16)),
  *(Layout(F16, weight) for weight in (None, F32, F16)),
  *(Layout(grad, None, True) for grad in (F32, BF16)),
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@dataclasses.dataclass
class State:
  """Arrays of one segment, with sentinels around each if it is guarded."""

  p: np.ndarray
  mu: np.ndarray
  nu: np.ndarray
  grad: np.ndarray
  weight: np.ndarray | None = None
  p_low: np.ndarray | None = None
  sum: np.ndarray | None = None
  sumsq: np.ndarray | None = None

  def segment(self):
    return Segment(*(getattr(self, x.name) for x in dataclasses.fields(self)))

  def arrays(self):
    arrays = (getattr(self, x.name) for x in dataclasses.fields(self))
    return [x for x in arrays if x is not None]

  def map(self, function):
    """Applies a function to each array."""
    arrays = (getattr(self, x.name) for x in dataclasses.fields(self))
    return State(*(None if x is None else function(x) for x in arrays))

  def copy(self):
    return self.map(np.copy)

  def masters(self):
    """p, mu and nu in float32."""
    p = self.p if self.p_low is None else join_float32(self.p, self.p_low)
    return p, self.mu, self.nu

  def whole_grad(self):
    """The gradient that a step sees, before grad_scale."""
    with np.errstate(invalid="ignore"):
      grad = self.grad.astype(F32)
    return grad if self.sum is None else accumulate_float32(self.sum, grad)

  def twin(self, scalars=SCALARS, grad_scale=GRAD_SCALE):
    """The state after a step of the NumPy twin."""
    grad = self.whole_grad()
    p, mu, nu = adamw_float32(*self.masters(), grad, scalars, grad_scale)
    after = self.copy()
    after.p, after.mu, after.nu = p, mu, nu
    if self.weight is not None:
      after.weight = ROUND[self.weight.dtype](p)
    if self.p_low is not None:
      after.p, after.p_low = split_float32(quiet_nan(p))
    if self.sumsq is not None:
      after.sumsq = chunk_sums_of_squares(grad)
    return after


def random_state(
  n,
  grad_dtype=F32,
  weight_dtype=None,
  seed=0,
  *,
  split=False,
  with_sum=False,
  with_squares=False,
):
  rng = np.random.default_rng(seed)
  state = State(
    p=rng.standard_normal(n, F32),
    mu=rng.standard_normal(n, F32) * F32.type(1e-2),
    nu=rng.standard_normal(n, F32) ** 2 * F32.type(1e-4),
    grad=rng.standard_normal(n, F32).astype(grad_dtype),
    weight=None if weight_dtype is None else np.zeros(n, weight_dtype),
    sum=rng.standard_normal(n, F32) if with_sum else None,
    sumsq=np.full(-(-n // CHUNK_ELEMS), -1.0) if with_squares else None,
  )
  if split:
    state.p, state.p_low = split_float32(state.p)
  return state


def state_of(layout, n, seed=0, **kwargs):
  return random_state(
    n, layout.grad, layout.weight, seed, split=layout.split, **kwargs
  )


def random_bits(rng, like):
  """An array like another, of random bytes."""
  return np.frombuffer(rng.bytes(like.nbytes), like.dtype).copy()


@dataclasses.dataclass
class SumState:
  """Arrays of one segment that is added up, like State."""

  total: np.ndarray
  grad: np.ndarray
  sumsq: np.ndarray | None

  def segment(self):
    return AccumulateSegment(self.total, self.grad, self.sumsq)

  def arrays(self):
    arrays = (self.total, self.grad, self.sumsq)
    return [x for x in arrays if x is not None]

  def twin(self, method):
    """The state after one of the SUM_METHODS of the NumPy twin."""
    if method == "widen":
      with np.errstate(invalid="ignore"):
        total = self.grad.astype(F32)
    else:
      total = accumulate_float32(self.total, self.grad)
    sumsq = None if self.sumsq is None else chunk_sums_of_squares(total)
    return SumState(total, self.grad.copy(), sumsq)

  def copy(self):
    arrays = (self.total, self.grad, self.sumsq)
    return SumState(*(None if x is None else x.copy() for x in arrays))


def random_sums(n, grad_dtype=F32, with_squares=True, seed=0):
  rng = np.random.default_rng(seed)
  return SumState(
    total=rng.standard_normal(n, F32),
    grad=rng.standard_normal(n, F32).astype(grad_dtype),
    sumsq=np.full(-(-n // CHUNK_ELEMS), -1.0) if with_squares else None,
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
    dataclasses.fields(state), itertools.cycle(offsets_bytes), strict=False
  ):
    values = getattr(state, field.name)
    if values is not None:
      values, check = guarded(values, offset)
      checks.append(check)
    fields[field.name] = values
  return type(state)(**fields), lambda: [check() for check in checks]


def assert_same_floats(actual, expected):
  """Every bit, except that a NaN equals any other."""
  assert actual.dtype == expected.dtype
  assert actual.dtype in (F32, F64)
  words = np.dtype(f"u{actual.itemsize}")
  np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
  numbers = ~np.isnan(expected)
  np.testing.assert_array_equal(
    actual[numbers].view(words), expected[numbers].view(words)
  )


def assert_same_state(actual, expected):
  """Every bit of every array, except that a NaN equals any other."""
  for field in dataclasses.fields(State):
    x, y = (getattr(state, field.name) for state in (actual, expected))
    if y is None:
      assert x is None
    elif field.name in ("p", "mu", "nu", "weight") and y.dtype == F32:
      assert_same_floats(x, y)
    elif field.name == "sumsq":
      assert_same_floats(x, y)
    else:
      assert x.dtype == y.dtype
      words = np.dtype(f"u{y.itemsize}")
      np.testing.assert_array_equal(
        x.view(words), y.view(words), err_msg=field.name
      )


def assert_same_sums(actual, expected):
  assert_same_floats(actual.total, expected.total)
  assert actual.grad.tobytes() == expected.grad.tobytes()
  assert (actual.sumsq is None) == (expected.sumsq is None)
  if expected.sumsq is not None:
    assert_same_floats(actual.sumsq, expected.sumsq)


def assert_refused(call, states, error, match):
  """The call raises, and no byte of any array changes."""
  before = [x.tobytes() for state in states for x in state.arrays()]
  with pytest.raises(error, match=match):
    call()
  assert before == [x.tobytes() for state in states for x in state.arrays()]


def float16_values():
  """The value of each of the 65536 bit patterns, in float64."""
  bits = np.arange(1 << 16)
  exponent, fraction = bits >> 10 & 0x1F, bits & 0x3FF
  significand = np.where(exponent == 0, fraction, fraction + 0x400)
  values = np.ldexp(significand.astype(F64), np.maximum(exponent, 1) - 25)
  values[exponent == 0x1F] = np.inf
  values[(exponent == 0x1F) & (fraction != 0)] = np.nan
  return np.copysign(values, np.where(bits >> 15 == 0, 1.0, -1.0))


_FLOAT_MAX = float(np.finfo(F32).max)
FLOAT_MIN = float(np.finfo(F32).tiny)
_SPECIAL = [
  *(0.0, 1.0, 1e-3, 1e20, 3e38, _FLOAT_MAX, np.inf),
  # Subnormal: the smallest, the largest, and one between.
  *(2.0**-149, FLOAT_MIN - 2.0**-149, 1e-40),
  *(FLOAT_MIN, 1e-30, np.nan),
]
SPECIAL = np.array([*_SPECIAL, *(-x for x in _SPECIAL)], F32)


class FpMode:
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
