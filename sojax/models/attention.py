"""Causal self-attention: cuDNN, blockwise in O(S) memory, or XLA's plain one.

Shape suffixes: B batch, T (queries) and S (keys) sequence, N heads, H head
dim; in the blockwise part Q and K are the length of one block and C the number
of blocks.

References:
  Dao, FlashAttention-2, arXiv 2307.08691, algorithms 1 and 2.
"""

import functools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import extend, lax

Implementation = Literal["auto", "cudnn", "blockwise", "xla"]

# Bounds of the length of a block of queries and of keys. Between them a block
# is an eighth of the sequence. Measured forward and backward in float32, N = 8,
# H = 64, on two x86 cores with AVX-512, in ms for blocks of 64, 128 and 256:
# B = 8, T = 512: 78, 86, 114; B = 4, T = 1024: 128, 120, 142; B = 1, T = 4096:
# 492, 429, 374. XLA's plain attention took 208, 733 and 3074, and was no faster
# at T = 256 (46 against 20), so "auto" has no length below which it is taken.
_MIN_BLOCK_TOKENS = 64
_MAX_BLOCK_TOKENS = 256

_MASKED = -1e30  # exp(_MASKED - anything) is 0, and no inf - inf gives a NaN


def attention(
  q_BTNH: jax.Array,
  k_BSNH: jax.Array,
  v_BSNH: jax.Array,
  *,
  implementation: Implementation = "auto",
) -> jax.Array:
  """Computes causal softmax attention, scores scaled by 1/sqrt(H).

  The softmax is in float32 whatever the operands' dtype.

  Args:
    q_BTNH: queries.
    k_BSNH: keys, as long as the queries (S = T), of the same dtype.
    v_BSNH: values, like the keys.
    implementation: "cudnn" (bfloat16 or float16 on a CUDA GPU), "blockwise"
      (any backend; memory grows linearly with T, forward and backward), "xla"
      (all T x T scores at once; the oracle) or "auto", see `choose`.

  Returns:
    [B, T, N, H] of the dtype of `q_BTNH`.

  Raises:
    ValueError: if shapes or dtypes differ, or `implementation` is unknown.
  """
  if not q_BTNH.shape == k_BSNH.shape == v_BSNH.shape or q_BTNH.ndim != 4:
    raise ValueError(
      "attention needs q, k and v of one shape [B, T, N, H]; got"
      f" {q_BTNH.shape}, {k_BSNH.shape} and {v_BSNH.shape}"
    )
  if not q_BTNH.dtype == k_BSNH.dtype == v_BSNH.dtype:
    raise ValueError(
      "attention needs q, k and v of one dtype; got"
      f" {q_BTNH.dtype}, {k_BSNH.dtype} and {v_BSNH.dtype}: cast them first"
    )
  if implementation not in get_args(Implementation):
    raise ValueError(
      f"implementation={implementation!r} is not one of"
      f" {', '.join(get_args(Implementation))}"
    )
  if implementation == "auto":
    implementation = choose(_is_cuda(), q_BTNH.dtype.name, q_BTNH.shape[-1])
  if implementation == "blockwise":
    return _blockwise(q_BTNH, k_BSNH, v_BSNH)
  return jax.nn.dot_product_attention(
    q_BTNH,
    k_BSNH,
    v_BSNH,
    is_causal=True,
    implementation="cudnn" if implementation == "cudnn" else "xla",
  )


def choose(is_cuda: bool, dtype: str, head_dim: int) -> Implementation:
  """Returns what "auto" means: cuDNN where it is supported, else blockwise.

  Args:
    is_cuda: whether the default backend is a CUDA GPU.
    dtype: name of the operands' dtype.
    head_dim: H; cuDNN takes multiples of 8 up to 128 on every GPU.
  """
  if (
    is_cuda
    and dtype in ("bfloat16", "float16")
    and head_dim % 8 == 0
    and head_dim <= 128
  ):
    return "cudnn"
  return "blockwise"


@functools.cache
def _is_cuda() -> bool:
  """Says whether the default backend is a CUDA GPU; asked once."""
  return "cuda" in extend.backend.get_backend().platform_version.lower()


def _block_tokens(num_tokens: int) -> int:
  """Returns the length of a block, chosen to need little padding."""
  longest = min(max(num_tokens // 8, _MIN_BLOCK_TOKENS), _MAX_BLOCK_TOKENS)
  num_blocks = math.ceil(num_tokens / longest)
  return 8 * math.ceil(num_tokens / (8 * num_blocks))


def _to_blocks(x_BTNH: jax.Array) -> jax.Array:
  """Cuts the sequence into blocks, zeros at its end: [C, B, N, Q, H]."""
  B, T, N, H = x_BTNH.shape
  Q = _block_tokens(T)
  C = math.ceil(T / Q)
  if C * Q > T:
    x_BTNH = jnp.pad(x_BTNH, ((0, 0), (0, C * Q - T), (0, 0), (0, 0)))
  return x_BTNH.reshape(B, C, Q, N, H).transpose(1, 0, 3, 2, 4)


def _from_blocks(x_CBNQH: jax.Array, num_tokens: int) -> jax.Array:
  """Undoes `_to_blocks`."""
  C, B, N, Q, H = x_CBNQH.shape
  x_BTNH = x_CBNQH.transpose(1, 0, 3, 2, 4).reshape(B, C * Q, N, H)
  return x_BTNH[:, :num_tokens]


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns an einsum accumulated and returned in float32."""
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _scores(q_BNQH, k_BNKH, causal_QK=None):
  """Returns scaled scores of one pair of blocks, float32 [B, N, Q, K]."""
  scale = 1.0 / math.sqrt(q_BNQH.shape[-1])
  s_BNQK = _dot("bnqh,bnkh->bnqk", q_BNQH, k_BNKH) * scale
  return s_BNQK if causal_QK is None else jnp.where(causal_QK, s_BNQK, _MASKED)


def _causal_block(length: int) -> jax.Array:
  """Returns the mask of a block on the diagonal: key not after query."""
  return jnp.tril(jnp.ones((length, length), bool))[None, None]


@jax.custom_vjp
def _blockwise(q_BTNH, k_BSNH, v_BSNH):
  return _blockwise_fwd(q_BTNH, k_BSNH, v_BSNH)[0]


def _blockwise_fwd(q_BTNH, k_BSNH, v_BSNH):
  """Computes the output and, for backward, each row's log-sum-exp."""
  q, k, v = map(_to_blocks, (q_BTNH, k_BSNH, v_BSNH))
  num_blocks, B, N, Q, H = q.shape
  causal_QK = _causal_block(Q)

  def query_block(_, args):
    i, q_BNQH = args

    def key_block(j, carry, mask=None):
      max_BNQ1, sum_BNQ1, out_BNQH = carry
      s_BNQK = _scores(q_BNQH, k[j], mask)
      new_max = jnp.maximum(max_BNQ1, s_BNQK.max(-1, keepdims=True))
      p_BNQK = jnp.exp(s_BNQK - new_max)
      shrink = jnp.exp(max_BNQ1 - new_max)
      out = _dot("bnqk,bnkh->bnqh", p_BNQK.astype(v.dtype), v[j])
      return (
        new_max,
        sum_BNQ1 * shrink + p_BNQK.sum(-1, keepdims=True),
        out_BNQH * shrink + out,
      )

    carry = (
      lax.full_like(q, _MASKED, jnp.float32, (B, N, Q, 1)),
      lax.full_like(q, 0.0, jnp.float32, (B, N, Q, 1)),
      lax.full_like(q, 0.0, jnp.float32, (B, N, Q, H)),
    )
    # Blocks of keys after this block of queries are not visited.
    carry = lax.fori_loop(0, i, key_block, carry)
    max_BNQ1, sum_BNQ1, out_BNQH = key_block(i, carry, causal_QK)
    out_BNQH = (out_BNQH / sum_BNQ1).astype(q_BTNH.dtype)
    return None, (out_BNQH, max_BNQ1 + jnp.log(sum_BNQ1))

  blocks = jnp.arange(num_blocks)
  _, (out, lse) = lax.scan(query_block, None, (blocks, q))
  out_BTNH = _from_blocks(out, q_BTNH.shape[1])
  return out_BTNH, (q_BTNH, k_BSNH, v_BSNH, out_BTNH, lse)


def _blockwise_bwd(residuals, d_out_BTNH):
  """Recomputes the probabilities block by block from the log-sum-exp."""
  q_BTNH, k_BSNH, v_BSNH, out_BTNH, lse = residuals
  q, k, v, d_out = map(_to_blocks, (q_BTNH, k_BSNH, v_BSNH, d_out_BTNH))
  num_blocks, B, N, Q, H = q.shape
  causal_QK = _causal_block(Q)
  scale = 1.0 / math.sqrt(H)
  # Each row's sum of p * dp; the softmax's gradient subtracts it.
  delta_BTN1 = jnp.sum(
    out_BTNH.astype(jnp.float32) * d_out_BTNH.astype(jnp.float32),
    axis=-1,
    keepdims=True,
  )
  delta = _to_blocks(delta_BTN1)

  def query_block(carry, args):
    i, q_BNQH, d_out_BNQH, lse_BNQ1, delta_BNQ1 = args

    def key_block(j, carry, mask=None):
      d_q_BNQH, d_k, d_v = carry
      p_BNQK = jnp.exp(_scores(q_BNQH, k[j], mask) - lse_BNQ1)
      d_p_BNQK = _dot("bnqh,bnkh->bnqk", d_out_BNQH, v[j])
      d_s_BNQK = (p_BNQK * (d_p_BNQK - delta_BNQ1) * scale).astype(q.dtype)
      p_BNQK = p_BNQK.astype(q.dtype)
      d_v_j = _dot("bnqk,bnqh->bnkh", p_BNQK, d_out_BNQH)
      d_k_j = _dot("bnqk,bnqh->bnkh", d_s_BNQK, q_BNQH)
      return (
        d_q_BNQH + _dot("bnqk,bnkh->bnqh", d_s_BNQK, k[j]),
        d_k.at[j].add(d_k_j),
        d_v.at[j].add(d_v_j),
      )

    d_q_BNQH = lax.full_like(q, 0.0, jnp.float32, (B, N, Q, H))
    carry = lax.fori_loop(0, i, key_block, (d_q_BNQH, *carry))
    d_q_BNQH, d_k, d_v = key_block(i, carry, causal_QK)
    return (d_k, d_v), d_q_BNQH.astype(q.dtype)

  zeros = lax.full_like(k, 0.0, jnp.float32)
  blocks = jnp.arange(num_blocks)
  (d_k, d_v), d_q = lax.scan(
    query_block, (zeros, zeros), (blocks, q, d_out, lse, delta)
  )
  T = q_BTNH.shape[1]
  return tuple(_from_blocks(x, T).astype(q.dtype) for x in (d_q, d_k, d_v))


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)
