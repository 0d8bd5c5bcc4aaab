"""Oracle: plain attention and its gradient in float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from sojax.models.attention import attention, choose

EPS_FP32 = 2.0**-23


def plain_attention(q, k, v, d_out):
  """Returns the output, dq, dk and dv of causal attention, float64."""
  q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
  scale = 1.0 / np.sqrt(q.shape[-1])
  s = np.einsum("btnh,bsnh->bnts", q, k) * scale
  s = np.where(np.tri(q.shape[1], dtype=bool), s, -np.inf)
  p = np.exp(s - s.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  out = np.einsum("bnts,bsnh->btnh", p, v)
  d_p = np.einsum("btnh,bsnh->bnts", d_out, v)
  d_s = p * (d_p - (d_p * p).sum(-1, keepdims=True)) * scale
  return (
    out,
    np.einsum("bnts,bsnh->btnh", d_s, k),
    np.einsum("bnts,btnh->bsnh", d_s, q),
    np.einsum("bnts,btnh->bsnh", p, d_out),
  )


def inputs(num_tokens, *, batch=2, heads=3, head_dim=8, dtype=jnp.float32):
  rng = np.random.default_rng(num_tokens)
  shape = (batch, num_tokens, heads, head_dim)
  return [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(4)]


@functools.partial(jax.jit, static_argnums=4)
def output_and_gradients(q, k, v, d_out, implementation):
  def f(q, k, v):
    return attention(q, k, v, implementation=implementation)

  out, vjp = jax.vjp(f, q, k, v)
  return (out, *vjp(d_out))


# One block, exactly one, just past one, and lengths whose blocks are longer,
# without and with padding.
@pytest.mark.parametrize(
  ("implementation", "num_tokens"),
  [
    *(("blockwise", T) for T in (1, 7, 64, 65, 200, 1024, 1027)),
    ("xla", 65),
    ("auto", 65),
  ],
)
def test_equals_float64(implementation, num_tokens):
  args = inputs(num_tokens)
  got = output_and_gradients(*args, implementation)
  for name, x, want in zip(
    ("out", "dq", "dk", "dv"), got, plain_attention(*args), strict=True
  ):
    assert x.dtype == jnp.float32
    # Operands are N(0, 1), below 5. A score is off by (H + 2) roundings of a
    # sum whose terms add up to less than 20, which is the relative error of a
    # probability; a result sums up to T terms weighted by probabilities, whose
    # weights add up to 1 (rows) or about 1 + log T (columns).
    bound = EPS_FP32 * (20 * (8 + 2) + num_tokens) * 2
    np.testing.assert_allclose(
      np.asarray(x, np.float64), want, rtol=0, atol=bound, err_msg=name
    )


def test_bfloat16_equals_float64_of_the_same_operands():
  args = inputs(150, dtype=jnp.bfloat16)
  got = output_and_gradients(*args, "blockwise")
  for x, want in zip(got, plain_attention(*args), strict=True):
    assert x.dtype == jnp.bfloat16
    # Two roundings to bfloat16 (of p or ds, and of the result; the output's is
    # in delta once more), each 2^-9 relative to the largest term; terms after
    # the softmax add up to less than 4 times the largest result.
    bound = 3 * 2.0**-9 * 4 * max(np.abs(want).max(), 1.0)
    np.testing.assert_allclose(
      np.asarray(x, np.float64), want, rtol=0, atol=bound
    )


def test_large_scores_neither_overflow_nor_lose_rows():
  q, k, v, d_out = inputs(150)
  got = output_and_gradients(q * 60, k * 60, v, d_out, "blockwise")
  want = plain_attention(q * 60, k * 60, v, d_out)
  # Scores reach 60 * 60 * 20: a rounding of them is 2^-23 * 72000 = 0.009, a
  # relative error of each probability; dq and dk have a factor of 60 more.
  for x, y, size in zip(got, want, (5, 300, 300, 30), strict=True):
    np.testing.assert_allclose(
      np.asarray(x, np.float64), y, rtol=0, atol=0.02 * size
    )


@pytest.mark.parametrize("implementation", ["blockwise", "xla"])
def test_later_tokens_change_no_bit_of_earlier_outputs(implementation):
  q, k, v, _ = inputs(200)
  f = jax.jit(functools.partial(attention, implementation=implementation))
  before = f(q, k, v)
  k, v = k.at[:, 130:].set(9.0), v.at[:, 130:].set(-9.0)
  after = f(q, k, v)
  assert jnp.array_equal(before[:, :130], after[:, :130])
  assert not jnp.any(jnp.all(before[:, 130:] == after[:, 130:], axis=-1))


def temp_bytes(num_tokens, implementation):
  """Returns the compiled temporary memory of forward and backward."""
  shape = (1, num_tokens, 2, 16)
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  compiled = output_and_gradients.lower(x, x, x, x, implementation).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_blockwise_memory_is_linear_in_the_sequence():
  short, long = (temp_bytes(T, "blockwise") for T in (2048, 8192))
  assert long <= 4 * short
  # The figure is one that sees scores: those of the plain one are there.
  scores_bytes = 4 * 2 * 2048 * 2048
  assert temp_bytes(2048, "xla") >= scores_bytes > 2 * short


@pytest.mark.parametrize(
  ("is_cuda", "dtype", "head_dim", "want"),
  [
    (True, "bfloat16", 64, "cudnn"),
    (True, "float16", 72, "cudnn"),
    (True, "bfloat16", 128, "cudnn"),
    (True, "float32", 64, "blockwise"),
    (True, "bfloat16", 100, "blockwise"),
    (True, "bfloat16", 136, "blockwise"),
    (False, "bfloat16", 64, "blockwise"),
    (False, "float32", 64, "blockwise"),
  ],
)
def test_auto_takes_cudnn_where_it_is_supported(is_cuda, dtype, head_dim, want):
  assert choose(is_cuda, dtype, head_dim) == want


@pytest.mark.parametrize("check_vma", [True, False])
def test_runs_on_shards(check_vma):
  args = inputs(150, batch=4)
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  spec = PartitionSpec("data")
  sharded = jax.shard_map(
    lambda *args: output_and_gradients(*args, "blockwise"),
    mesh=mesh,
    in_specs=spec,
    out_specs=spec,
    check_vma=check_vma,
  )
  got = jax.jit(sharded)(*args)
  for x, want in zip(got, plain_attention(*args), strict=True):
    # As in test_equals_float64.
    bound = EPS_FP32 * (20 * (8 + 2) + 150) * 2
    np.testing.assert_allclose(np.asarray(x), want, rtol=0, atol=bound)


def test_refuses_operands_that_do_not_match():
  q, k, v, _ = inputs(8)
  with pytest.raises(ValueError, match=r"one shape .* \(2, 7, 3, 8\)"):
    attention(q, k[:, :7], v)
  with pytest.raises(ValueError, match="one dtype; got .* bfloat16"):
    attention(q, k.astype(jnp.bfloat16), v)
  with pytest.raises(ValueError, match="'flash' is not one of auto, cudnn"):
    attention(q, k, v, implementation="flash")
