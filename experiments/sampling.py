"""Draws text from a language model, one token at a time.

Shapes: B batch, T window, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def sample(
  model: nnx.Module,
  prompt: np.ndarray,
  *,
  num_tokens: int,
  window: int,
  temperature: float = 1.0,
  seed: int = 0,
) -> np.ndarray:
  """Continues a prompt.

  The model reads a window of fixed size, so that one compiled program serves
  every position: what is not written yet lies after what is, where a causal
  model does not look. Once the window is full, it moves on token by token.

  Args:
    model: maps int32 tokens [B, T] to logits [B, T, V], causally.
    prompt: int tokens, at least one; its last `window` tokens are read.
    num_tokens: number of tokens to draw.
    window: tokens the model reads at once, at most its longest sequence.
    temperature: above 0; the logits are divided by it.
    seed: chooses the draw.

  Returns:
    The drawn tokens, int32 [num_tokens], without the prompt.

  Raises:
    ValueError: if the prompt is empty or `temperature` is not above 0.
  """
  if not len(prompt):
    raise ValueError("a prompt of 0 tokens predicts nothing; give one or more")
  if not temperature > 0:
    raise ValueError(f"temperature={temperature} must be above 0")
  prompt = np.asarray(prompt, np.int32)[-window:]
  tokens_T = np.zeros(window, np.int32)
  tokens_T[: len(prompt)] = prompt
  graphdef, state = nnx.split(model)
  keys = jax.random.split(jax.random.key(seed), num_tokens)
  drawn = _draw(graphdef, state, tokens_T, len(prompt), keys, temperature)
  return np.asarray(drawn)


@functools.partial(jax.jit, static_argnums=0)
def _draw(graphdef, state, tokens_T, length, keys, temperature):
  model = nnx.merge(graphdef, state)
  model.eval()
  window = tokens_T.shape[0]

  def draw_one(carry, key):
    tokens_T, length = carry
    logits_V = model(tokens_T[None])[0, length - 1]
    token = jax.random.categorical(key, logits_V / temperature)
    is_full = length == window
    tokens_T = jnp.where(is_full, jnp.roll(tokens_T, -1), tokens_T)
    length = jnp.where(is_full, window - 1, length)
    return (tokens_T.at[length].set(token), length + 1), token

  carry = (tokens_T, jnp.asarray(length))
  return jax.lax.scan(draw_one, carry, keys)[1]
