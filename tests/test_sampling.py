"""Sampling; the oracle calls the model on exactly the text so far."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import sampling

_VOCAB = 11


class _SumModel(nnx.Module):
  """A causal model whose logits depend on all tokens so far and their order."""

  def __init__(self, rngs: nnx.Rngs):
    self.table = nnx.Param(jax.random.normal(rngs.params(), (_VOCAB, _VOCAB)))
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, tokens_BT):
    x_BTV = self.dropout(self.table[...][tokens_BT])
    place_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.float32) + 1.0
    return jnp.cumsum(x_BTV * place_T[None, :, None], axis=1)


def _greedy(model, prompt, num_tokens, window):
  """The most likely token after the last `window` ones, again and again."""
  table = np.asarray(model.table[...], np.float64)
  tokens = list(prompt)
  for _ in range(num_tokens):
    seen = tokens[-window:]
    logits = sum(table[token] * (i + 1) for i, token in enumerate(seen))
    tokens.append(int(np.argmax(logits)))
  return tokens[len(prompt) :]


@pytest.mark.parametrize("prompt_len", [1, 3, 8, 12])
@pytest.mark.parametrize("num_tokens", [1, 5, 20])
def test_cold_samples_are_the_most_likely_tokens(prompt_len, num_tokens):
  model = _SumModel(nnx.Rngs(0))
  prompt = np.arange(prompt_len) % _VOCAB
  drawn = sampling.sample(
    model, prompt, num_tokens=num_tokens, window=8, temperature=1e-4
  )
  assert drawn.dtype == np.int32
  np.testing.assert_array_equal(drawn, _greedy(model, prompt, num_tokens, 8))


def test_seed_decides_the_draw():
  model = _SumModel(nnx.Rngs(0))

  def draw(seed):
    drawn = sampling.sample(
      model, [1], num_tokens=40, window=8, temperature=5.0, seed=seed
    )
    return drawn.tolist()

  assert draw(0) == draw(0) != draw(1)


def test_samples_follow_the_probabilities():
  # One token ahead of a fixed prompt: independent draws of one distribution.
  model = _SumModel(nnx.Rngs(0))
  draws = [
    sampling.sample(model, [3], num_tokens=1, window=4, seed=seed)[0]
    for seed in range(400)
  ]
  shares = np.bincount(draws, minlength=_VOCAB) / len(draws)
  logits = np.asarray(model.table[...], np.float64)[3]
  expected = np.exp(logits) / np.exp(logits).sum()
  # Five standard deviations of a share.
  bound = 5 * np.sqrt(expected * (1 - expected) / len(draws))
  assert np.all(np.abs(shares - expected) < bound)


def test_model_stays_in_training_mode():
  model = _SumModel(nnx.Rngs(0))
  sampling.sample(model, [1], num_tokens=1, window=4)
  assert not model.dropout.deterministic


def test_bad_arguments_are_refused():
  model = _SumModel(nnx.Rngs(0))
  with pytest.raises(ValueError, match="prompt of 0 tokens"):
    sampling.sample(model, [], num_tokens=1, window=4)
  with pytest.raises(ValueError, match="temperature=0"):
    sampling.sample(model, [1], num_tokens=1, window=4, temperature=0)
