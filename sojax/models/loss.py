"""Losses: sums over positions of mask times cross entropy, or a user's own.

Shape suffixes: B batch, T sequence, D model dim, V vocabulary; C number of
chunks and N tokens in a chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sojax.models import varying

Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(what a model returns, targets_BT, mask_BT) -> a float32 scalar: the sum over
positions of mask times the loss. Whoever trains divides by the sum of masks."""


def loss_function(module: Any, loss: Loss | None = None) -> Loss:
  """Returns the function from a last stage's input to its loss.

  Args:
    module: the last stage.
    loss: a loss of what the module returns. None takes the module's own method
      `loss(x, targets_BT, mask_BT)`, of its input, if it has one; else the
      module must return logits, and the loss is `cross_entropy`.
  """
  own: Loss | None = getattr(module, "loss", None)
  if loss is None and callable(own):
    return own
  of_output = loss or cross_entropy
  return lambda x, targets, mask: of_output(module(x), targets, mask)


def cross_entropy(
  logits_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
  """Computes the sum over positions of mask times cross entropy, in float32.

  Args:
    logits_BTV: floating point.
    targets_BT: integers in [0, V); one outside of it makes the loss NaN.
    mask_BT: weight of each position.

  Returns:
    A float32 scalar.

  Raises:
    ValueError: if the shapes do not match.
  """
  if logits_BTV.ndim != 3 or logits_BTV.shape[:2] != targets_BT.shape:
    raise ValueError(
      f"the model returns {logits_BTV.dtype} {logits_BTV.shape}; it must return"
      f" logits {(*targets_BT.shape, 'vocabulary size')}, or be given a loss="
    )
  loss_BT = optax.softmax_cross_entropy_with_integer_labels(
    logits_BTV.astype(jnp.float32), targets_BT
  )
  return jnp.sum(mask_BT * loss_BT)


def chunked_cross_entropy(
  x_BTD: jax.Array,
  table_VD: jax.Array,
  targets_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  chunk_tokens: int,
) -> jax.Array:
  """Computes the sum over positions of mask times cross entropy.

  The logits are x @ table.T. They exist for one chunk of positions at a time,
  and once: where a gradient is wanted, each chunk leaves its share of it while
  its logits are at hand (softmax minus one-hot, times mask), so that backward
  only scales, and computes no logits again. Products take the operands' dtype
  and are accumulated in float32; the softmax and all sums over positions are
  in float32.

  Args:
    x_BTD: final activations, floating point.
    table_VD: output embedding, of the same dtype.
    targets_BT: integers in [0, V). Outside of it the result is not defined.
    mask_BT: weight of each position, converted to float32.
    chunk_tokens: most positions whose logits exist at once. Memory is about
      4 * chunk_tokens * V bytes, twice that where a gradient is computed.

  Returns:
    A float32 scalar, differentiable by `x_BTD`, `table_VD` and `mask_BT` once;
    not by forward mode.

  Raises:
    ValueError: if shapes or dtypes do not match or `chunk_tokens` is below 1.
  """
  B, T, D = x_BTD.shape
  if table_VD.ndim != 2 or table_VD.shape[1] != D:
    raise ValueError(
      f"table has shape {table_VD.shape}, but x has D={D}: it must be [V, {D}]"
    )
  if targets_BT.shape != (B, T) or mask_BT.shape != (B, T):
    raise ValueError(
      f"targets {targets_BT.shape} and mask {mask_BT.shape} must both have the"
      f" shape {(B, T)} of the positions of x"
    )
  if x_BTD.dtype != table_VD.dtype:
    raise ValueError(
      f"x is {x_BTD.dtype} but table is {table_VD.dtype}: cast one of them"
    )
  if chunk_tokens < 1:
    raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
  table_VD = varying.as_varying(table_VD, x_BTD, targets_BT, mask_BT)
  x_BTD = varying.as_varying(x_BTD, table_VD)
  mask_BT = varying.as_varying(mask_BT.astype(jnp.float32), table_VD)
  return _loss(
    x_BTD.reshape(B * T, D),
    table_VD,
    targets_BT.reshape(B * T),
    mask_BT.reshape(B * T),
    math.ceil(B * T / chunk_tokens),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss(x, table_VD, targets, mask, num_chunks):
  """Sums over all positions, given flat."""

  def chunk(total, args):
    x_ND, targets_N, mask_N = args
    loss_N, _, _ = _cross_entropy(x_ND, table_VD, targets_N)
    return total + jnp.sum(mask_N * loss_N), None

  zero = lax.full_like(x, 0.0, jnp.float32, ())
  chunks = _chunks(num_chunks, x, targets, mask)
  return _scan(chunk, zero, chunks)[0]


def _loss_fwd(x, table_VD, targets, mask, num_chunks):
  """Computes the sum and, per unit of its cotangent, all gradients."""

  def chunk(carry, args):
    total, d_table_VD = carry
    x_ND, targets_N, mask_N = args
    loss_N, exp_NV, sum_N = _cross_entropy(x_ND, table_VD, targets_N)
    is_target_NV = targets_N[:, None] == jnp.arange(table_VD.shape[0])[None]
    d_logits_NV = exp_NV * (mask_N / sum_N)[:, None] - jnp.where(
      is_target_NV, mask_N[:, None], 0.0
    )
    d_logits_NV = d_logits_NV.astype(x.dtype)
    d_x_ND = jnp.einsum("nv,vd->nd", d_logits_NV, table_VD)
    d_table = _dot("nv,nd->vd", d_logits_NV, x_ND)
    d_table_VD = d_table if d_table_VD is None else d_table_VD + d_table
    return (total + jnp.sum(mask_N * loss_N), d_table_VD), (d_x_ND, loss_N)

  zero = lax.full_like(x, 0.0, jnp.float32, ())
  # One chunk needs no zeros to add to.
  d_table_VD = lax.full_like(table_VD, 0.0, jnp.float32)
  init = (zero, d_table_VD if num_chunks > 1 else None)
  chunks = _chunks(num_chunks, x, targets, mask)
  (total, d_table_VD), (d_x, loss) = _scan(chunk, init, chunks)
  num_positions = x.shape[0]
  d_x = d_x.reshape(-1, x.shape[1])[:num_positions]
  return total, (d_x, d_table_VD, loss.reshape(-1)[:num_positions])


def _loss_bwd(num_chunks, residuals, cotangent):
  """Scales what forward left. Targets have no gradient."""
  d_x, d_table_VD, loss = residuals
  return (
    (d_x * cotangent).astype(d_x.dtype),
    (d_table_VD * cotangent).astype(d_x.dtype),
    None,
    loss * cotangent,
  )


_loss.defvjp(_loss_fwd, _loss_bwd)


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns an einsum accumulated and returned in float32."""
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _cross_entropy(x_ND, table_VD, targets_N):
  """Returns the loss [N], exp(logits - max) [N, V] and its sum [N]."""
  logits_NV = _dot("nd,vd->nv", x_ND, table_VD)
  max_N1 = logits_NV.max(axis=-1, keepdims=True)
  target_N1 = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=-1)
  exp_NV = jnp.exp(logits_NV - max_N1)
  sum_N = exp_NV.sum(axis=-1)
  loss_N = jnp.log(sum_N) + (max_N1 - target_N1)[:, 0]
  return loss_N, exp_NV, sum_N


def _chunks(num_chunks: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Cuts flat arrays into equal chunks: [C, N, ...], zeros at the end.

  A zero of the mask takes a position that was added out of all sums.
  """
  num_positions = arrays[0].shape[0]
  chunk = math.ceil(num_positions / num_chunks)
  added = num_chunks * chunk - num_positions

  def cut(x):
    if added:
      x = jnp.pad(x, ((0, added),) + ((0, 0),) * (x.ndim - 1))
    return x.reshape(num_chunks, chunk, *x.shape[1:])

  return tuple(map(cut, arrays))


def _scan(body, carry, chunks):
  """Runs `lax.scan`, or the body in line if there is one chunk."""
  if chunks[0].shape[0] > 1:
    return lax.scan(body, carry, chunks)
  carry, y = body(carry, tuple(x[0] for x in chunks))
  return carry, y
