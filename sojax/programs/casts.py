"""Casts between float32 and the working dtype, on the device."""

import jax
import jax.numpy as jnp


def narrow(x: jax.Array, dtype: jnp.dtype | str) -> jax.Array:
  """Rounds float32 masters to the working dtype as the host kernel does.

  Args:
    x: float32, any shape.
    dtype: float32 (nothing to do); float16: nearest, ties to even, NaN to
      0x7e00; bfloat16: nearest, ties away from zero, NaN to 0x7fc0, in integer
      code. Both sides give the same bits.

  Returns:
    The working weights, of x's shape.
  """
  if jnp.dtype(dtype) == jnp.float32:
    return x
  if jnp.dtype(dtype) == jnp.float16:
    nan = jax.lax.bitcast_convert_type(jnp.uint16(0x7E00), jnp.float16)
    return jnp.where(jnp.isnan(x), nan, x.astype(jnp.float16))
  assert jnp.dtype(dtype) == jnp.bfloat16, dtype
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  half = ((bits + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16)
  half = jnp.where(jnp.isnan(x), jnp.uint16(0x7FC0), half)
  return jax.lax.bitcast_convert_type(half, jnp.bfloat16)
