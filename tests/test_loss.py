"""Oracle: log_softmax and its gradient in float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from sojax.models.loss import chunked_cross_entropy

EPS_FP32 = 2.0**-23


def plain_cross_entropy(x, table, targets, mask):
  """Returns the loss, dx, dtable and dmask, float64."""
  x, table, mask = (np.asarray(a, np.float64) for a in (x, table, mask))
  targets = np.asarray(targets)[..., None]
  logits = x @ table.T
  logits -= logits.max(-1, keepdims=True)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  loss = -np.take_along_axis(log_p, targets, -1)[..., 0]
  d_logits = np.exp(log_p)
  at_target = np.take_along_axis(d_logits, targets, -1) - 1.0
  np.put_along_axis(d_logits, targets, at_target, -1)
  d_logits *= mask[..., None]
  return (
    (loss * mask).sum(),
    d_logits @ table,
    np.einsum("btv,btd->vd", d_logits, x),
    loss,
  )


def inputs(B, T, *, D=16, V=61, dtype=jnp.float32):
  rng = np.random.default_rng(B * T)
  x = jnp.asarray(rng.standard_normal((B, T, D)), dtype)
  table = jnp.asarray(rng.standard_normal((V, D)), dtype)
  targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
  # Masked, whole and fractional positions.
  mask = jnp.asarray(rng.choice([0.0, 1.0, 0.25], (B, T)), jnp.float32)
  return x, table, targets, mask


@functools.partial(jax.jit, static_argnums=(4, 5))
def loss_and_gradients(x, table, targets, mask, chunk_tokens, scale=1.0):
  def f(x, table, mask):
    return scale * chunked_cross_entropy(
      x, table, targets, mask, chunk_tokens=chunk_tokens
    )

  loss, gradients = jax.value_and_grad(f, (0, 1, 2))(x, table, mask)
  return (loss, *gradients)


# Chunks: all in one, exact division, a remainder, one position each.
@pytest.mark.parametrize(
  ("B", "T", "chunk_tokens"),
  [(2, 8, 64), (2, 8, 16), (2, 8, 4), (3, 7, 4), (3, 7, 20), (1, 5, 1)],
)
def test_equals_float64(B, T, chunk_tokens):
  args = inputs(B, T)
  # A power of two: the cotangent rounds nothing.
  got = loss_and_gradients(*args, chunk_tokens, 0.125)
  want = plain_cross_entropy(*args)
  D, V = 16, 61
  # Logits are sums of D products below 25 in all: that many roundings, relative
  # in the softmax. Sums over V, D and positions of terms below 5 follow.
  bound = 0.125 * EPS_FP32 * (25 * D + 5 * (V + B * T)) * 2
  for name, x, y in zip(
    ("loss", "dx", "dtable", "dmask"), got, want, strict=True
  ):
    assert x.dtype == jnp.float32
    np.testing.assert_allclose(
      np.asarray(x, np.float64),
      0.125 * y,
      rtol=B * T * EPS_FP32,
      atol=bound,
      err_msg=name,
    )


@pytest.mark.parametrize("chunk_tokens", [4, 64])
def test_without_gradient_the_loss_has_the_same_value(chunk_tokens):
  args = inputs(3, 7)
  alone = chunked_cross_entropy(*args, chunk_tokens=chunk_tokens)
  with_gradient = loss_and_gradients(*args, chunk_tokens)[0]
  # Two programs, the same roundings but in another order: 21 terms below 20.
  assert abs(float(alone - with_gradient)) <= 21 * 20 * 21 * EPS_FP32
  assert alone.dtype == jnp.float32


def test_a_masked_position_has_no_influence():
  x, table, targets, mask = inputs(2, 9)
  masked = mask == 0.0
  other_x = jnp.where(masked[..., None], 7.0, x)
  other_targets = jnp.where(masked, 3, targets)
  before = loss_and_gradients(x, table, targets, mask, 4)
  after = loss_and_gradients(other_x, table, other_targets, mask, 4)
  assert jnp.any(masked)
  assert before[0] == after[0]
  assert jnp.array_equal(before[2], after[2])
  for d_x in (before[1], after[1]):
    assert jnp.all(jnp.where(masked[..., None], d_x, 0.0) == 0.0)


def test_large_logits_neither_overflow_nor_vanish():
  x, table, targets, mask = inputs(2, 8)
  got = loss_and_gradients(x * 100, table, targets, mask, 4)
  want = plain_cross_entropy(x * 100, table, targets, mask)
  # Logits reach 2,500: one rounding of such a sum is 2500 * 2^-23 = 3e-4, D of
  # them 5e-3; that is the relative error of a probability. dtable sums 16
  # positions times x < 500.
  for x, y, size in zip(got, want, (16, 20, 16 * 500, 1), strict=True):
    np.testing.assert_allclose(np.asarray(x), y, rtol=0, atol=5e-3 * size)


def test_bfloat16_gradients_are_accumulated_in_float32():
  x, table, targets, mask = inputs(8, 128, dtype=jnp.bfloat16)
  mask = jnp.ones_like(mask)
  got = loss_and_gradients(x, table, targets, mask, 4)  # 256 chunks
  want = plain_cross_entropy(x, table, targets, mask)
  assert [a.dtype for a in got] == [
    "float32",
    "bfloat16",
    "bfloat16",
    "float32",
  ]
  # 1,024 terms below 4 each are off by 2^-9 relative when the logits' gradient
  # is rounded, independently: the sum by less than 5 standard deviations of
  # 4 * 2^-9 * sqrt(1024 / 3); and its own rounding. Adding 256 chunks up in
  # bfloat16 is off by several times that.
  atol = 5 * 2.0**-9 * np.sqrt(1024 / 3) * 0.25
  np.testing.assert_allclose(
    np.asarray(got[2], np.float64), want[2], rtol=2.0**-8, atol=atol
  )
  np.testing.assert_allclose(float(got[0]), want[0], rtol=1024 * EPS_FP32)


def test_logits_never_exist_at_once():
  V, D, chunk_tokens = 4096, 8, 128

  def temp_bytes(num_tokens):
    shapes = (
      jax.ShapeDtypeStruct((1, num_tokens, D), jnp.float32),
      jax.ShapeDtypeStruct((V, D), jnp.float32),
      jax.ShapeDtypeStruct((1, num_tokens), jnp.int32),
      jax.ShapeDtypeStruct((1, num_tokens), jnp.float32),
    )
    compiled = loss_and_gradients.lower(*shapes, chunk_tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  chunk_bytes = 4 * chunk_tokens * V
  short, long = temp_bytes(1024), temp_bytes(8192)
  assert chunk_bytes <= short <= 3 * chunk_bytes
  # What grows is dx, twice, the loss of each position and masks: less than
  # 4 * (2 * D + 8) bytes a position, where logits have 4 * V.
  assert long - short <= 4 * (2 * D + 8) * (8192 - 1024)


@pytest.mark.parametrize("chunk_tokens", [4, 64])
def test_backward_computes_no_logits_again(chunk_tokens):
  args = inputs(3, 7)
  jaxpr = jax.make_jaxpr(loss_and_gradients, static_argnums=4)(
    *args, chunk_tokens
  )
  # Logits, dx and dtable, in the body of the scan or in line.
  assert str(jaxpr).count("dot_general[") == 3


@pytest.mark.parametrize("check_vma", [True, False])
def test_runs_on_shards(check_vma):
  args = inputs(4, 7)
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  data, everywhere = PartitionSpec("data"), PartitionSpec()

  def shard(*args):
    loss, d_x, d_table, d_mask = loss_and_gradients(*args, 4)
    if not check_vma:  # Otherwise autodiff has summed a replicated table's.
      d_table = jax.lax.psum(d_table, "data")
    return jax.lax.psum(loss, "data"), d_x, d_table, d_mask

  got = jax.jit(
    jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=(data, everywhere, data, data),
      out_specs=(everywhere, data, everywhere, data),
      check_vma=check_vma,
    )
  )(*args)
  # As in test_equals_float64.
  bound = EPS_FP32 * (25 * 16 + 5 * (61 + 28)) * 2
  for x, y in zip(got, plain_cross_entropy(*args), strict=True):
    np.testing.assert_allclose(np.asarray(x), y, rtol=28 * EPS_FP32, atol=bound)


def test_refuses_operands_that_do_not_match():
  x, table, targets, mask = inputs(2, 8)
  with pytest.raises(ValueError, match=r"\(61, 15\), but x has D=16"):
    chunked_cross_entropy(x, table[:, :15], targets, mask, chunk_tokens=4)
  with pytest.raises(ValueError, match=r"targets \(2, 7\) .* shape \(2, 8\)"):
    chunked_cross_entropy(x, table, targets[:, :7], mask, chunk_tokens=4)
  with pytest.raises(ValueError, match="x is float32 but table is bfloat16"):
    chunked_cross_entropy(
      x, table.astype(jnp.bfloat16), targets, mask, chunk_tokens=4
    )
  with pytest.raises(ValueError, match="chunk_tokens=0 must be at least 1"):
    chunked_cross_entropy(x, table, targets, mask, chunk_tokens=0)
