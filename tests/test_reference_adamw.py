"""The slow twins. Oracles: optax in float64, libm's fused multiply-add."""

import ctypes
import ctypes.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sojax.plan.adamw import adam_scalars, adamw
from sojax.reference.adamw import (
  adamw_float32,
  adamw_float64,
  fma_float32,
  round_to_bfloat16,
  round_to_float16,
)

F32 = np.dtype(np.float32)


def libm_fma(a, b, c):
  fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
  fmaf.restype = ctypes.c_float
  fmaf.argtypes = [ctypes.c_float] * 3
  return np.array([fmaf(*x) for x in zip(a, b, c, strict=True)], F32)


def assert_fma_is_libms(a, b, c):
  actual, expected = fma_float32(a, b, c), libm_fma(a, b, c)
  assert actual.dtype == F32
  np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
  numbers = ~np.isnan(expected)
  np.testing.assert_array_equal(
    actual[numbers].view(np.uint32), expected[numbers].view(np.uint32)
  )


def test_fma_of_random_bits_is_libms():
  rng = np.random.default_rng(0)
  assert_fma_is_libms(
    *(np.frombuffer(rng.bytes(4 * 30_000), F32) for _ in range(3))
  )


def test_fma_next_to_a_tie_is_libms():
  # Products of 13 bits are often a tie of float32; a c far below it decides,
  # which a second rounding would not see.
  rng = np.random.default_rng(1)
  n = 30_000
  a, b = (
    rng.integers(1 << 12, 1 << 13, n).astype(F32) * rng.choice([-1, 1], n)
    for _ in range(2)
  )
  c = rng.choice([-1, 1], n) * np.exp2(rng.integers(-120, 60, n).astype(float))
  assert_fma_is_libms(a.astype(F32), b.astype(F32), c.astype(F32))
  # So it happens here that rounding twice is wrong.
  twice = (a.astype(float) * b + c).astype(F32)
  assert np.any(twice != fma_float32(a.astype(F32), b.astype(F32), c))


def test_fma_that_ends_subnormal_is_libms():
  rng = np.random.default_rng(2)
  n = 30_000
  a, b, c = (
    (rng.standard_normal(n) * 2.0**exponent).astype(F32)
    for exponent in (-70, -74, -146)
  )
  assert_fma_is_libms(a, b, c)


@pytest.mark.parametrize("eps_root", [0.0, 1e-8])
@pytest.mark.parametrize("b1, b2", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.0)])
def test_float64_is_optax_in_float64(b1, b2, eps_root):
  hyper = dict(b1=b1, b2=b2, eps=1e-8, eps_root=eps_root, weight_decay=0.1)
  optimizer = optax.adamw(1e-2, **hyper)
  rng = np.random.default_rng(3)
  p, mu, nu = rng.standard_normal(101), np.zeros(101), np.zeros(101)
  with jax.enable_x64(True):
    p_optax = jnp.array(p)
    opt_state = optimizer.init(p_optax)
    for count in range(20):
      grad = rng.standard_normal(101)
      updates, opt_state = optimizer.update(jnp.array(grad), opt_state, p_optax)
      p_optax = optax.apply_updates(p_optax, updates)
      p, mu, nu = adamw_float64(
        p, mu, nu, grad, count=count, learning_rate=1e-2, **hyper
      )
    # About 30 roundings of 1.1e-16 a step, against values of about 1; the
    # bias corrections at t = 1 lose a factor 1 / (1 - b2) of that.
    tolerance = 20 * 30 * 1.2e-16 / max(1 - b2, 1e-3)
    for actual, expected in (
      (p, p_optax),
      (mu, opt_state[0].mu),
      (nu, opt_state[0].nu),
    ):
      expected = np.asarray(expected)
      assert expected.dtype == np.float64
      np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def test_float64_scales_the_gradient_first():
  state = (np.ones(3), np.ones(3), np.ones(3))
  grad = np.array([1.0, -2.0, 3.0])
  hyper = dict(
    count=4,
    learning_rate=1e-3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    eps_root=0.0,
    weight_decay=0.1,
  )
  scaled = adamw_float64(*state, grad, grad_scale=0.25, **hyper)
  plain = adamw_float64(*state, grad * 0.25, **hyper)
  np.testing.assert_array_equal(scaled, plain)


def test_float32_of_a_hand_worked_step():
  # Every value and every intermediate is exact in float32.
  scalars = adam_scalars(
    adamw(0.5, b1=0.5, b2=0.75, eps=0.5, weight_decay=0.25), count=0
  )
  # t = 1: k = 1 / sqrt(0.25) = 2, s = -0.5 / 0.5 = -1, d = -0.125.
  assert (scalars.k, scalars.s, scalars.d) == (2.0, -1.0, -0.125)
  p, mu, nu, grad = (np.array([x], F32) for x in (8.0, 2.0, 4.0, 8.0))
  p, mu, nu = adamw_float32(p, mu, nu, grad, scalars, 0.25)
  # g = 2; mu = 0.5 * 2 + 0.5 * 2; nu = 0.75 * 4 + 0.25 * 4;
  # u = -(2 / (2 * 2 + 0.5)); p = 8 + (8 * -0.125 + u).
  u = -np.float32(2.0 / 4.5)
  assert (mu[0], nu[0]) == (2.0, 4.0)
  assert p[0] == np.float32(8.0 + float(np.float32(-1.0 + float(u))))


def test_bfloat16_rounds_to_nearest_with_ties_away_from_zero():
  rows = [
    (0x3F800000, 0x3F80),
    (0x3F807FFF, 0x3F80),
    (0x3F808000, 0x3F81),
    (0x3F818000, 0x3F82),
    (0xBF808000, 0xBF81),
    (0x7F7FFFFF, 0x7F80),
    (0xFF7FFFFF, 0xFF80),
    (0x7F800000, 0x7F80),
    (0xFF800000, 0xFF80),
    (0x80000000, 0x8000),
    (0x80007FFF, 0x8000),
    (0x00008000, 0x0001),
    (0x7F800001, 0x7FC0),
    (0xFFFFFFFF, 0x7FC0),
  ]
  masters, weights = (np.array(x) for x in zip(*rows, strict=True))
  actual = round_to_bfloat16(masters.astype(np.uint32).view(F32))
  np.testing.assert_array_equal(actual.view(np.uint16), weights)


def test_float16_rounds_to_nearest_even():
  rows = [
    (0x3F800000, 0x3C00),  # 1 stays
    (0x3F800FFF, 0x3C00),  # below the tie
    (0x3F801000, 0x3C00),  # the tie above an even number
    (0x3F801001, 0x3C01),  # above the tie
    (0x3F803000, 0x3C02),  # the tie above an odd number
    (0xBF803000, 0xBC02),
    (0x477FE000, 0x7BFF),  # 65504, the largest
    (0x477FEFFF, 0x7BFF),
    (0x477FF000, 0x7C00),  # half a step past it
    (0xC77FF000, 0xFC00),
    (0x7F7FFFFF, 0x7C00),
    (0xFF800000, 0xFC00),
    (0x38800000, 0x0400),  # 2^-14, the smallest normal number
    (0x387FC000, 0x03FF),  # the largest subnormal one
    (0x387FE000, 0x0400),  # the tie between the two
    (0x33800000, 0x0001),  # 2^-24
    (0x33C00000, 0x0002),  # 1.5 * 2^-24
    (0x33000000, 0x0000),  # 2^-25, the tie above 0
    (0x33000001, 0x0001),
    (0xB3000000, 0x8000),
    (0x00000001, 0x0000),
    (0x7F800001, 0x7E00),  # every NaN
    (0xFFFFFFFF, 0x7E00),
  ]
  masters, weights = (np.array(x) for x in zip(*rows, strict=True))
  actual = round_to_float16(masters.astype(np.uint32).view(F32))
  np.testing.assert_array_equal(actual.view(np.uint16), weights)


def test_float16_rounds_random_bits_as_numpy_does():
  rng = np.random.default_rng(4)
  # Exponents from 2^-27 to 2^17: all of float16 and a little around it.
  exponents = rng.integers(100, 145, 300_000).astype(np.uint32)
  fractions = rng.integers(0, 1 << 23, exponents.size).astype(np.uint32)
  x = (exponents << 23 | fractions).view(F32) * rng.choice(
    np.array([-1, 1], F32), exponents.size
  )
  with np.errstate(over="ignore"):
    expected = x.astype(np.float16)
  np.testing.assert_array_equal(
    round_to_float16(x).view(np.uint16), expected.view(np.uint16)
  )
