"""A hundred AdamW steps of the kernels against float64.

Oracle: `adamw_float64` on the same gradients, and a bound of each element's
error that is carried from step to step beside it.
"""

import dataclasses
import functools
import math

import numpy as np
import pytest

from sojax.host.kernels import Pool
from sojax.plan.adamw import adam_scalars, adamw
from sojax.reference.adamw import (
  adamw_float32,
  adamw_float64,
  fma_float32,
  move_float32,
)
from tests.kernel_cases import BF16, F32, F64, GRAD_SCALE, State, every_isa

U = 2.0**-24  # unit roundoff of float32
NUM_STEPS = 100
NUM_ELEMS = 5003

HYPERS = {
  "usual": adamw(1e-3, b2=0.999, weight_decay=0.1),
  "paper": adamw(3e-4, b2=0.95, weight_decay=0.1),
  "no decay": adamw(1e-3, weight_decay=0.0),
  "eps_root": adamw(1e-3, eps_root=1e-8),
  "no moments": adamw(1e-3, b1=0.0, b2=0.0),
  "lr 0": adamw(0.0, weight_decay=0.1),
  "little decay": adamw(1e-6, weight_decay=0.1),
}
every_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)


def first_p():
  return np.random.default_rng(0).standard_normal(NUM_ELEMS, F32)


def gradients(dtype):
  rng = np.random.default_rng(1)
  for _ in range(NUM_STEPS):
    yield rng.standard_normal(NUM_ELEMS, F32).astype(dtype)


@dataclasses.dataclass
class Drift:
  """Exact values and how far float32 may be from them, element by element.

  Attributes:
    p, mu, nu: float64.
    mu_error, nu_error: bounds of the error.
    move_error: of p's, without the rounding of each sum p + change.
    sum_error: of p's, by those roundings if all go the same way.
    sum_squares: the squares of the bounds of those roundings.
  """

  p: np.ndarray
  mu: np.ndarray
  nu: np.ndarray
  mu_error: np.ndarray
  nu_error: np.ndarray
  move_error: np.ndarray
  sum_error: np.ndarray
  sum_squares: np.ndarray

  def p_error(self):
    return self.move_error + self.sum_error


# Terms of second order are below this, relative: products of relative errors,
# the largest of which are about 1e-5.
_SECOND_ORDER = 1 + 1e-4


def drift_step(drift, grad, hyper, count):
  """Takes the float64 step and carries the bounds along.

  Counted along Numerics 1. A rounding is within U of the exact value, relative,
  and a rounded scalar brings one. What stands before a step is off by at most
  its error, and an exact value stands for the rounded one but for terms of
  second order.
    g: grad_scale, product: 2.
    GM: 1-b1, g, product: 4. GV: 1-b2, g twice, two products: 1 + 4 + 2 = 7.
    mu': mu's error times b1; b1, of b1 * mu; GM's; the sum.
    nu': the same.
    nu' + r: nu's error; r, of r; the sum. Its root: with e that error,
      relative, 1 - sqrt(1 - e) <= e / (2 sqrt(1 - e)); the root.
    fma(root, k, eps): positive terms, so the larger relative error of both, the
      root's with k, and the sum.
    U: the error of mu'; of the denominator; quotient, s, product.
    p * d + U: p's error times d; d, of p * d; U's; the sum.
    p': p's error, that, and the sum.
  """
  lr, t = hyper.learning_rate, count + 1
  g = grad.astype(F64) * GRAD_SCALE
  p, mu, nu = adamw_float64(
    *(drift.p, drift.mu, drift.nu, grad),
    count=count,
    learning_rate=lr,
    b1=hyper.b1,
    b2=hyper.b2,
    eps=hyper.eps,
    eps_root=hyper.eps_root,
    weight_decay=hyper.weight_decay,
    grad_scale=GRAD_SCALE,
  )
  mu_error = hyper.b1 * (drift.mu_error + U * np.abs(drift.mu))
  mu_error += 4 * U * np.abs((1 - hyper.b1) * g) + U * np.abs(mu)
  nu_error = hyper.b2 * (drift.nu_error + U * drift.nu)
  nu_error += 7 * U * (1 - hyper.b2) * g**2 + U * nu

  r = hyper.eps_root * (1 - hyper.b2**t)
  rooted = (nu_error + U * r) / (nu + r) + U
  below = rooted / (2 * np.sqrt(1 - rooted)) + 3 * U
  per_mu = lr / (1 - hyper.b1**t)
  per_mu /= np.sqrt(nu / (1 - hyper.b2**t) + hyper.eps_root) + hyper.eps
  move_error = per_mu * (mu_error + np.abs(mu) * (below + 3 * U))

  decay = lr * hyper.weight_decay
  change = p - drift.p
  change_error = decay * drift.p_error() + U * decay * np.abs(drift.p)
  change_error += move_error + U * np.abs(change)
  sum_error = U * np.abs(p) * _SECOND_ORDER
  underflow = 2.0**-148
  return Drift(
    *(p, mu, nu),
    mu_error * _SECOND_ORDER + underflow,
    nu_error * _SECOND_ORDER + underflow,
    drift.move_error + change_error * _SECOND_ORDER + underflow,
    drift.sum_error + sum_error,
    drift.sum_squares + sum_error**2,
  )


@functools.cache
def drift_of(name, dtype):
  """What a hundred float64 steps lead to, from moments of zero."""
  drift = Drift(first_p().astype(F64), *(np.zeros(NUM_ELEMS) for _ in range(7)))
  for count, grad in enumerate(gradients(dtype)):
    drift = drift_step(drift, grad, HYPERS[name], count)
  return drift


def mean_drift(p, drift):
  """How much further from zero p went than exact, on the average, and a bound.

  Most of an element's bound is the roundings of p to its own grid. Where moves
  differ by more than the steps of that grid, these roundings are as often up
  as down, whatever they were before. By Azuma's inequality their sum, here of
  all elements and steps, is past z times the root of the sum of their squared
  bounds with a probability below 2 exp(-z^2 / 2): 3e-8 for 6.
  """
  mean = np.mean((p - drift.p) * np.sign(drift.p))
  bound = np.mean(drift.move_error)
  bound += 6 * math.sqrt(np.sum(drift.sum_squares)) / drift.p.size
  return abs(mean), bound


@every_isa
@every_dtype
@pytest.mark.parametrize("name", HYPERS)
def test_a_hundred_steps_stay_within_their_roundings(isa, dtype, name):
  drift = drift_of(name, dtype)
  p = first_p()
  mu, nu = np.zeros_like(p), np.zeros_like(p)
  with Pool(2, isa=isa) as pool:
    for count, grad in enumerate(gradients(dtype)):
      segment = State(p, mu, nu, grad).segment()
      scalars = adam_scalars(HYPERS[name], count)
      pool.adamw_step([segment], scalars, GRAD_SCALE)
  change = p.astype(F64) - first_p()
  exact_change = drift.p - first_p()
  assert np.all(np.abs(mu - drift.mu) <= drift.mu_error)
  assert np.all(np.abs(nu - drift.nu) <= drift.nu_error)
  assert np.all(np.abs(change - exact_change) <= drift.p_error())
  # That the bounds say something: they are small beside what the steps do.
  assert np.mean(drift.mu_error) < 1e-5 * np.mean(np.abs(drift.mu))
  assert np.mean(drift.nu_error) < 1e-5 * np.mean(drift.nu)
  if name == "lr 0":
    assert not np.any(change)
  elif name != "no moments":  # whose moves are all of one size
    mean, bound = mean_drift(p, drift)
    assert mean <= bound <= 1e-2 * np.mean(np.abs(exact_change))


def test_decay_by_a_rounded_factor_would_drift():
  """Of p * (1 - 1e-7) + U: the factor is off by 1.9e-8 in each step."""
  hyper = HYPERS["little decay"]  # lr * wd is 1e-7
  drift = drift_of("little decay", F32)
  p = first_p()
  mu, nu = np.zeros_like(p), np.zeros_like(p)
  for count, grad in enumerate(gradients(F32)):
    scalars = adam_scalars(hyper, count)
    _, mu, nu = adamw_float32(p, mu, nu, grad, scalars, GRAD_SCALE)
    factor = F32.type(1.0 - 1e-7)
    p = fma_float32(p, factor, move_float32(mu, nu, scalars))
  mean, bound = mean_drift(p, drift)
  assert mean > 10 * bound
