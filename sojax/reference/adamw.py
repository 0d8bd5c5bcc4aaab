"""AdamW written to be read: the twins that the fast kernels are tested with.

`adamw_float64` is what AdamW means. `adamw_float32` is the same step with
every rounding where the kernels round, in NumPy, and gives their bits.
"""

import ml_dtypes
import numpy as np

from sojax.plan.adamw import AdamScalars

_BF16_NAN = 0x7FC0
_F16_NAN = 0x7E00


def adamw_float64(
  p: np.ndarray,
  mu: np.ndarray,
  nu: np.ndarray,
  grad: np.ndarray,
  *,
  count: int,
  learning_rate: float,
  b1: float,
  b2: float,
  eps: float,
  eps_root: float,
  weight_decay: float,
  grad_scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Takes one step of AdamW in double precision.

  Args:
    p: parameters, any shape; like all arrays here, of any real dtype.
    mu: first moments.
    nu: second moments.
    grad: gradients.
    count: steps taken before this one.
    learning_rate: of this step.
    b1: decay of mu.
    b2: decay of nu.
    eps: added outside the square root.
    eps_root: added inside the square root.
    weight_decay: of this step, decoupled; multiplied by the learning rate.
    grad_scale: multiplies the gradients first.

  Returns:
    New float64 arrays: the parameters, mu and nu after the step.

  References:
    Loshchilov and Hutter, arXiv 1711.05101, algorithm 2; `optax.adamw`.
  """
  p, mu, nu, grad = (np.asarray(x, np.float64) for x in (p, mu, nu, grad))
  t = count + 1
  grad = grad * grad_scale
  mu = b1 * mu + (1 - b1) * grad
  nu = b2 * nu + (1 - b2) * grad**2
  mu_hat = mu / (1 - b1**t)
  nu_hat = nu / (1 - b2**t)
  update = mu_hat / (np.sqrt(nu_hat + eps_root) + eps)
  p = p - learning_rate * (update + weight_decay * p)
  return p, mu, nu


def adamw_float32(
  p: np.ndarray,
  mu: np.ndarray,
  nu: np.ndarray,
  grad: np.ndarray,
  scalars: AdamScalars,
  grad_scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Takes one step with the roundings of the kernels.

  Args:
    p: parameters, float32, any shape.
    mu: first moments, float32.
    nu: second moments, float32.
    grad: gradients, float32, float16 or bfloat16.
    scalars: the scalars of the step.
    grad_scale: multiplies the gradients first, rounded to float32.

  Returns:
    New float32 arrays: the parameters, mu and nu after the step.
  """
  c = {
    name: np.float32(getattr(scalars, name))
    for name in AdamScalars.__dataclass_fields__
  }
  with np.errstate(all="ignore"):
    g = grad.astype(np.float32) * np.float32(grad_scale)
    mu = fma_float32(mu, c["b1"], c["one_minus_b1"] * g)
    nu = fma_float32(nu, c["b2"], c["one_minus_b2"] * (g * g))
    p = p + fma_float32(p, c["d"], move_float32(mu, nu, scalars))
  return p, mu, nu


def move_float32(
  mu: np.ndarray, nu: np.ndarray, scalars: AdamScalars
) -> np.ndarray:
  """Returns how far new moments move the parameters, before decay.

  Args:
    mu: first moments after the step, float32, any shape.
    nu: second moments after the step, float32.
    scalars: the scalars of the step.

  Returns:
    U of docs/design.md (Numerics 1), float32.
  """
  k, r, s, eps = (
    np.float32(getattr(scalars, name)) for name in ("k", "r", "s", "eps")
  )
  with np.errstate(all="ignore"):
    return mu / fma_float32(np.sqrt(nu + r), k, eps) * s


def fma_float32(
  a: np.ndarray, b: np.ndarray | np.float32, c: np.ndarray | np.float32
) -> np.ndarray:
  """Returns a * b + c, rounded once to float32.

  The product of two float32 is exact in float64. Its sum with c need not be,
  and rounding it twice, to 53 bits and then to 24, can differ from rounding
  it once. Rounding to odd in between makes it the same (Boldo and Melquiond,
  "Emulation of a FMA and correctly rounded sums", IEEE Trans. Computers 57,
  2008).

  >>> a, b, c = (np.float32([x]) for x in (1 + 2**-12, 1 + 2**-12, 2**-60))
  >>> float(fma_float32(a, b, c)[0]) == 1 + 2**-11 + 2**-23
  True
  >>> float((np.float64(a) * b + c).astype(np.float32)[0]) == 1 + 2**-11
  True
  """
  with np.errstate(all="ignore"):
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    c = np.asarray(c, np.float64)
    total = product + c
    # What the sum lost, exactly (Knuth's two-sum).
    part = total - product
    lost = (product - (total - part)) + (c - part)
    is_even = total.view(np.int64) & 1 == 0
    to_odd = np.isfinite(total) & (lost != 0) & is_even
    neighbour = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where(to_odd, neighbour, total).astype(np.float32)


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
  """Returns the nearest bfloat16, ties away from zero; NaN gives 0x7fc0.

  >>> float(round_to_bfloat16(np.float32([1 + 2**-8]))[0]) == 1 + 2**-7
  True
  """
  bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
  halves = ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
  halves = np.where(np.isnan(x), np.uint16(_BF16_NAN), halves)
  return halves.view(ml_dtypes.bfloat16)


def round_to_float16(x: np.ndarray) -> np.ndarray:
  """Returns the nearest float16, ties to even; NaN gives 0x7e00.

  From half a step past the largest number, 65504, on, that is infinity.

  >>> [float(y) for y in round_to_float16(np.float32([1 + 2**-11, 65520]))]
  [1.0, inf]
  """
  with np.errstate(invalid="ignore"):
    wide = np.asarray(x, np.float32).astype(np.float64)
  # 2^(exponent - 1) <= |x| < 2^exponent; subnormals share the last step.
  _, exponent = np.frexp(wide)
  step = np.exp2(np.maximum(exponent - 1, -14) - 10.0)
  with np.errstate(all="ignore"):
    rounded = (np.rint(wide / step) * step).astype(np.float16)
  rounded[np.isnan(wide)] = np.uint16(_F16_NAN).view(np.float16)
  return rounded
