"""The AdamW kernels: their bits and their meaning.

Oracles: the NumPy twin (`adamw_float32`) for bits, float64 NumPy and optax for
the meaning.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from sojax.host.kernels import Pool
from sojax.host.segments import Segment
from sojax.plan.adamw import adam_scalars, adamw
from sojax.reference.adamw import adamw_float64, round_to_float16
from tests.kernel_cases import (
  BF16,
  F16,
  F32,
  F64,
  GRAD_SCALE,
  LAYOUTS,
  SCALARS,
  SPECIAL,
  FpMode,
  State,
  assert_same_floats,
  assert_same_state,
  every_grad,
  every_isa,
  every_layout,
  float16_values,
  guarded_state,
  random_state,
  state_of,
)

U = 2.0**-24  # unit roundoff of float32


# Bits.


@every_isa
@every_layout
def test_every_short_length_has_the_twins_bits_and_keeps_its_neighbours(
  isa, layout
):
  with Pool(1, isa=isa) as pool:
    # Far past twice the 32 elements of one turn of the main loop.
    for n in [*range(258), 4099]:
      state = state_of(layout, n, seed=n)
      expected = state.twin()
      # Every address, odd bytes included, turns up for some array.
      offsets = [(n * step) % 64 for step in (1, 3, 5, 7, 11, 13, 17, 19)]
      state, check_guards = guarded_state(state, offsets)
      pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)
      assert_same_state(state, expected)
      check_guards()


@every_isa
@pytest.mark.parametrize("weight_dtype", [F32, BF16, F16], ids=str)
def test_alignment_of_the_weights_does_not_matter(isa, weight_dtype):
  original = random_state(3 * 32 + 5, F32, weight_dtype)
  expected = original.twin()
  with Pool(1, isa=isa) as pool:
    for offset in range(64):
      for n in (1, 7, 31, original.p.size):
        part = original.map(lambda x: x[:n])  # noqa: B023
        state, check_guards = guarded_state(part, [0, 4, 8, 2, offset])
        pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)
        assert_same_state(state, expected.map(lambda x: x[:n]))  # noqa: B023
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
    state_of(layout, n, seed=n) for n, layout in enumerate(LAYOUTS, start=70)
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
  weight_dtype = F16 if grad_dtype == F16 else BF16
  state = State(p, mu, nu, grad, np.zeros(p.size, weight_dtype))
  scalars = adam_scalars(hyper, count=0)
  expected = state.twin(scalars, 1.0)
  with Pool(1, isa=isa) as pool:
    pool.adamw_step([state.segment()], scalars, 1.0)
  assert_same_state(state, expected)


@every_isa
@every_layout
@pytest.mark.parametrize("with_sum", [False, True])
def test_random_bit_patterns_have_the_twins_bits(isa, layout, with_sum):
  rng = np.random.default_rng(2)
  n = 1 << 16
  state = state_of(layout, n, with_sum=with_sum)
  state = state.map(
    lambda x: np.frombuffer(rng.bytes(x.nbytes), x.dtype).copy()
  )
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
  actual = rounded_weights(isa, masters.astype(np.uint32).view(F32), BF16)
  np.testing.assert_array_equal(actual.view(np.uint16), weights)


@every_isa
def test_float16_weights_round_to_nearest_even(isa):
  # Each number, the middle between it and the next, and a bit to either side.
  numbers = np.append(float16_values()[:0x7C00], 65536.0)
  middles = (numbers[:-1] + numbers[1:]) / 2
  points = np.concatenate([numbers, middles]).astype(F32)
  below, above = (np.nextafter(points, F32.type(x)) for x in (0, np.inf))
  finite = SPECIAL[np.isfinite(SPECIAL)]
  nans = np.array([0xFF800001, 0x7FFFFFFF], np.uint32).view(F32)
  p = np.concatenate([points, -points, below, -below, above, -above])
  p = np.concatenate([p, finite, nans])
  actual = rounded_weights(isa, p, F16)
  np.testing.assert_array_equal(
    actual.view(np.uint16), round_to_float16(p).view(np.uint16)
  )


def rounded_weights(isa, p, dtype):
  """What a step that changes nothing writes as weights."""
  zeros = np.zeros_like(p)
  state = State(p, zeros, zeros.copy(), zeros.copy(), np.zeros(p.size, dtype))
  scalars = adam_scalars(adamw(0.0, weight_decay=0.0), count=0)
  with Pool(1, isa=isa) as pool:
    pool.adamw_step([state.segment()], scalars, 1.0)
  return state.weight


@every_isa
def test_every_float16_gradient_is_widened_exactly(isa):
  grad = np.arange(1 << 16).astype(np.uint16).view(F16)
  p, mu, nu = (np.zeros(grad.size, F32) for _ in range(3))
  scalars = adam_scalars(adamw(0.0, b1=0.0, b2=0.0), count=0)  # mu is g
  with Pool(1, isa=isa) as pool:
    pool.adamw_step([Segment(p, mu, nu, grad)], scalars, 1.0)
  expected = float16_values().astype(F32)
  expected[expected == 0] = 0.0  # the sum with 0 * b1 has no -0
  assert_same_floats(mu, expected)


# The floating-point environment.


@every_isa
@pytest.mark.parametrize(
  "dtype, scale", [(F32, 1e-38), (BF16, 1e-38), (F16, 1e-6)]
)
def test_subnormals_survive_a_caller_that_flushes_them(isa, dtype, scale):
  # Gradients and weights are subnormal in their dtype, moments in float32.
  state = random_state(1001, F32, dtype)
  state.p *= F32.type(scale)
  state.mu *= F32.type(1e-38)
  state.nu *= F32.type(1e-38)
  state.grad = (state.grad * F32.type(scale)).astype(dtype)
  scalars = adam_scalars(adamw(0.1 * scale, eps=1e-38), count=0)
  expected = state.twin(scalars, 1.0)
  for x in (state.grad, expected.weight, expected.nu):
    smallest = float(ml_dtypes.finfo(x.dtype).tiny)
    assert np.any((x != 0) & (np.abs(x.astype(F64)) < smallest))
  with FpMode() as mode:
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
