"""GPT as trained in the SuperOffload paper, in Flax NNX.

Pre-LayerNorm, GELU, learned positions, and an output embedding tied to the
input's. Parameters are created in float32. Activations have the dtype of the
parameters, so that casting the parameters is all there is to mixed precision;
LayerNorm's statistics, attention's softmax, the logits and the loss are float32
in any case.

Shape suffixes: B batch, T sequence, D model dim, F feed-forward dim, N heads,
H head dim, V vocabulary.

References:
  SuperOffload, arXiv 2509.21271, section 5.
  Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx

from sojax.models import loss, varying
from sojax.models.attention import Implementation, attention
from sojax.models.stage import Stage

_INIT_STDDEV = 0.02
_NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
  """Shape and options of a GPT.

  Attributes:
    vocab_size: V, number of token ids.
    num_layers: number of blocks.
    hidden_dim: D, a multiple of `num_heads`.
    num_heads: N, attention heads.
    max_seq_len: longest sequence, in tokens: one learned position each.
    mlp_ratio: F / D.
    tie_head: whether the output embedding is the input embedding's parameter.
    dropout: probability in [0, 1) of dropping an element of the embedding's
      output and of what each attention and feed-forward adds. 0 keeps no
      random state in the model.
    attention: implementation, see `sojax.models.attention.attention`.
    loss_chunk_tokens: most positions whose logits exist at once.
  """

  vocab_size: int
  num_layers: int
  hidden_dim: int
  num_heads: int
  max_seq_len: int
  mlp_ratio: int = 4
  tie_head: bool = True
  dropout: float = 0.0
  attention: Implementation = "auto"
  loss_chunk_tokens: int = 2048

  def __post_init__(self):
    for field in (
      "vocab_size",
      "num_layers",
      "hidden_dim",
      "num_heads",
      "max_seq_len",
      "mlp_ratio",
      "loss_chunk_tokens",
    ):
      value = getattr(self, field)
      if value < 1:
        raise ValueError(f"{field}={value} must be at least 1")
    if self.hidden_dim % self.num_heads:
      raise ValueError(
        f"hidden_dim={self.hidden_dim} is not a multiple of"
        f" num_heads={self.num_heads}; change one of them"
      )
    if not 0.0 <= self.dropout < 1.0:
      raise ValueError(f"dropout={self.dropout} must be in [0, 1)")
    if self.attention not in get_args(Implementation):
      raise ValueError(
        f"attention={self.attention!r} is not one of"
        f" {', '.join(get_args(Implementation))}"
      )


class GPT(nnx.Module):
  """A decoder-only transformer.

  Attributes:
    config: its shape.
    embed: the first stage.
    blocks: one stage each.
    head: the last stage. With `config.tie_head`, `head.table` is the very
      object `embed.tokens`.
  """

  def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
    self.config = config
    self.embed = Embed(config, rngs=rngs)
    self.blocks = nnx.List(
      [Block(config, rngs=rngs) for _ in range(config.num_layers)]
    )
    table = self.embed.tokens if config.tie_head else None
    self.head = Head(config, table, rngs=rngs)

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    """Returns the logits of each next token, float32 [B, T, V].

    Args:
      tokens_BT: int32 in [0, V), T at most `config.max_seq_len`.

    Raises:
      ValueError: if the sequence is too long.
    """
    x_BTD = self.embed(tokens_BT)
    for block in self.blocks:
      x_BTD = block(x_BTD)
    return self.head(x_BTD)

  @property
  def vocab_size(self) -> int:
    """Number of token ids; batches with others are refused."""
    return self.config.vocab_size

  def stages(self) -> list[Stage]:
    """Returns "embed", "block_0" to "block_{L-1}" and "head"."""
    blocks = [
      Stage(name=f"block_{i}", module=block)
      for i, block in enumerate(self.blocks)
    ]
    return [
      Stage(name="embed", module=self.embed),
      *blocks,
      Stage(name="head", module=self.head),
    ]


def abstract_gpt(config: GPTConfig) -> GPT:
  """Describes a GPT of any size without allocating it.

  One block is traced; the others are copies of it.

  Returns:
    A GPT whose variables hold `jax.ShapeDtypeStruct`.
  """
  one_block = replace(config, num_layers=1)
  model = nnx.eval_shape(lambda: GPT(one_block, rngs=nnx.Rngs(0)))
  first = model.blocks[0]
  copies = [nnx.clone(first) for _ in range(config.num_layers - 1)]
  model.blocks = nnx.List([first, *copies])
  model.config = config
  return model


class Embed(nnx.Module):
  """Token embedding plus learned positions: int32 [B, T] to [B, T, D]."""

  def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
    V, S, D = config.vocab_size, config.max_seq_len, config.hidden_dim
    self.tokens = _normal_param((V, D), _INIT_STDDEV, rngs)
    self.positions = _normal_param((S, D), _INIT_STDDEV, rngs)
    self.dropout = _dropout(config, rngs)

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    """Looks tokens up and adds their positions, in the parameters' dtype."""
    T, max_seq_len = tokens_BT.shape[1], self.positions.shape[0]
    if T > max_seq_len:
      raise ValueError(
        f"a sequence of {T} tokens is longer than max_seq_len={max_seq_len};"
        " shorten it or build the model with a larger max_seq_len"
      )
    x_BTD = _lookup(self.tokens[...], tokens_BT)
    return self.dropout(x_BTD + self.positions[...][None, :T])


class Block(nnx.Module):
  """Attention and feed-forward, each of the normalised residual stream."""

  def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
    self.attn_norm = _LayerNorm(config.hidden_dim)
    self.attn = _Attention(config, rngs=rngs)
    self.mlp_norm = _LayerNorm(config.hidden_dim)
    self.mlp = _MLP(config, rngs=rngs)
    self.dropout = _dropout(config, rngs)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Maps [B, T, D] to [B, T, D]."""
    x_BTD = x_BTD + self.dropout(self.attn(self.attn_norm(x_BTD)))
    return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class Head(nnx.Module):
  """Final LayerNorm and output embedding.

  Args:
    config: shape of the model.
    table: the Param to use as output embedding, [V, D]; None creates one.
    rngs: where a new table comes from.
  """

  def __init__(
    self, config: GPTConfig, table: nnx.Param | None, *, rngs: nnx.Rngs
  ):
    self.norm = _LayerNorm(config.hidden_dim)
    if table is None:
      shape = (config.vocab_size, config.hidden_dim)
      table = _normal_param(shape, _INIT_STDDEV, rngs)
    self.table = table
    self.loss_chunk_tokens = config.loss_chunk_tokens

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    """Returns logits, float32 [B, T, V]."""
    return jnp.einsum(
      "btd,vd->btv",
      self.norm(x_BTD),
      self.table[...],
      preferred_element_type=jnp.float32,
    )

  def loss(
    self, x_BTD: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array
  ) -> jax.Array:
    """Returns the sum of mask times cross entropy, a float32 scalar.

    Args:
      x_BTD: output of the last block.
      targets_BT: the token that follows each position, int32.
      mask_BT: weight of each position, float32.
    """
    return loss.chunked_cross_entropy(
      self.norm(x_BTD),
      self.table[...],
      targets_BT,
      mask_BT,
      chunk_tokens=self.loss_chunk_tokens,
    )


class _Attention(nnx.Module):
  """Causal multi-head self-attention."""

  def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
    D = config.hidden_dim
    self.num_heads = config.num_heads
    self.implementation: Implementation = config.attention
    self.qkv = _linear(D, 3 * D, _INIT_STDDEV, rngs)
    self.out = _linear(D, D, _residual_stddev(config), rngs)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    B, T, D = x_BTD.shape
    N = self.num_heads
    qkv_BTCNH = self.qkv(x_BTD).reshape(B, T, 3, N, D // N)
    q_BTNH, k_BTNH, v_BTNH = (qkv_BTCNH[:, :, i] for i in range(3))
    out_BTNH = attention(
      q_BTNH, k_BTNH, v_BTNH, implementation=self.implementation
    )
    return self.out(out_BTNH.reshape(B, T, D))


class _MLP(nnx.Module):
  """Two linear layers around a GELU."""

  def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
    D, F = config.hidden_dim, config.mlp_ratio * config.hidden_dim
    self.up = _linear(D, F, _INIT_STDDEV, rngs)
    self.down = _linear(F, D, _residual_stddev(config), rngs)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    return self.down(_gelu(self.up(x_BTD)))


# A GELU and a norm leave only their input to backward, which computes them
# again. Automatic differentiation would keep six arrays for a GELU, each of
# them written and read: with 25M parameters and 4,096 tokens on two cores, a
# step that keeps its activations took 3.4 s so and 4.0 s without.
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


@_recomputed
def _gelu(x: jax.Array) -> jax.Array:
  return jax.nn.gelu(x, approximate=True)


@_recomputed
def _layer_norm(
  x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array
) -> jax.Array:
  y_BTD = x_BTD.astype(jnp.float32)
  y_BTD = y_BTD - y_BTD.mean(axis=-1, keepdims=True)
  variance_BT1 = jnp.square(y_BTD).mean(axis=-1, keepdims=True)
  y_BTD = y_BTD * jax.lax.rsqrt(variance_BT1 + _NORM_EPSILON)
  y_BTD = y_BTD * scale_D[None, None] + bias_D[None, None]
  return y_BTD.astype(x_BTD.dtype)


class _LayerNorm(nnx.Module):
  """LayerNorm computed in float32 and returned in the input's dtype."""

  def __init__(self, num_features: int):
    self.scale = nnx.Param(jnp.ones(num_features))
    self.bias = nnx.Param(jnp.zeros(num_features))

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    return _layer_norm(x_BTD, self.scale[...], self.bias[...])


def _residual_stddev(config: GPTConfig) -> float:
  """Returns the deviation that keeps a sum over all layers at one size.

  Each of L blocks adds twice to the residual stream (GPT-2's initialisation).
  """
  return _INIT_STDDEV / math.sqrt(2 * config.num_layers)


def _normal_param(
  shape: tuple[int, ...], stddev: float, rngs: nnx.Rngs
) -> nnx.Param:
  """Creates a float32 parameter from N(0, stddev^2)."""
  return nnx.Param(nnx.initializers.normal(stddev)(rngs.params(), shape))


def _linear(
  num_in: int, num_out: int, stddev: float, rngs: nnx.Rngs
) -> nnx.Linear:
  """Creates a linear layer that computes in its parameters' dtype."""
  init = nnx.initializers.normal(stddev)
  return nnx.Linear(num_in, num_out, kernel_init=init, rngs=rngs)


def _dropout(config: GPTConfig, rngs: nnx.Rngs) -> nnx.Dropout:
  """Creates a dropout with a random stream of its own, if it needs one."""
  return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)


def _lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
  """Returns rows of a table; their gradients are summed in float32.

  A frequent token gathers thousands of terms, which bfloat16 cannot add up.
  """
  return _lookup_rows(varying.as_varying(table_VD, tokens_BT), tokens_BT)


@jax.custom_vjp
def _lookup_rows(table_VD, tokens_BT):
  return table_VD[tokens_BT]


def _lookup_rows_fwd(table_VD, tokens_BT):
  # An empty slice carries the table's shape and dtype to backward.
  return table_VD[tokens_BT], (table_VD[:, :0], tokens_BT)


def _lookup_rows_bwd(residuals, d_x_BTD):
  empty_V0, tokens_BT = residuals
  shape = (empty_V0.shape[0], d_x_BTD.shape[-1])
  d_table_VD = jax.lax.full_like(d_x_BTD, 0.0, jnp.float32, shape)
  d_table_VD = d_table_VD.at[tokens_BT].add(d_x_BTD.astype(jnp.float32))
  return d_table_VD.astype(d_x_BTD.dtype), None


_lookup_rows.defvjp(_lookup_rows_fwd, _lookup_rows_bwd)
