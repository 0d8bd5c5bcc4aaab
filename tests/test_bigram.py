"""The bigram model; the oracle counts pairs in plain Python."""

import collections
import math

import numpy as np
import pytest

from experiments import bigram
from sojax.data import tokens as tokens_lib
from sojax.data.text import load_corpus

_TRAIN = b"the cat sat on the mat; a rat ate the oats that the cat had.\n"
_VALIDATION = b"the rat has a hat\xff"


def _log_prob(train: bytes, first: int, second: int, strength: float):
  pairs = collections.Counter(zip(train, train[1:], strict=False))
  num_first = sum(n for (a, _), n in pairs.items() if a == first)
  unigram = (train.count(second) + 1) / (len(train) + 256)
  share = pairs[first, second] + strength * unigram
  return math.log(share / (num_first + strength))


def test_probabilities_are_those_of_counted_pairs():
  model = bigram.fit(tokens_lib.encode(_TRAIN))
  for first in {*_TRAIN, 0, 255}:
    for second in range(256):
      expected = _log_prob(_TRAIN, first, second, model.strength)
      # Both sum a few float64 terms: some ulps of a logarithm below 16.
      assert abs(model.log_probs[first, second] - expected) < 1e-13


def test_probabilities_after_each_byte_sum_to_one():
  model = bigram.fit(tokens_lib.encode(_TRAIN))
  assert model.log_probs.shape == (256, 256)
  np.testing.assert_allclose(
    np.exp(model.log_probs).sum(1), 1.0, rtol=0, atol=256 * 1e-15
  )


def test_strength_is_the_best_when_each_pair_is_left_out():
  def left_out_loss(strength):
    total = 0.0
    pairs = collections.Counter(zip(_TRAIN, _TRAIN[1:], strict=False))
    for (first, second), count in pairs.items():
      num_first = sum(n for (a, _), n in pairs.items() if a == first)
      unigram = (_TRAIN.count(second) + 1) / (len(_TRAIN) + 256)
      share = (count - 1 + strength * unigram) / (num_first - 1 + strength)
      total -= count * math.log(share)
    return total

  model = bigram.fit(tokens_lib.encode(_TRAIN))
  best = min((2.0**i for i in range(-4, 13)), key=left_out_loss)
  assert model.strength == best


@pytest.mark.parametrize("max_batches", [1, None])
def test_loss_is_the_mean_over_the_same_bytes_as_the_batches(max_batches):
  num_rows, seq_len = 2, 3
  model = bigram.fit(tokens_lib.encode(_TRAIN))
  batches = tokens_lib.validation_batches(
    tokens_lib.encode(_VALIDATION),
    num_rows=num_rows,
    seq_len=seq_len,
    max_batches=max_batches,
  )
  num_bytes = num_rows * seq_len if max_batches else len(_VALIDATION) - 1
  expected = -sum(
    _log_prob(_TRAIN, _VALIDATION[i], _VALIDATION[i + 1], model.strength)
    for i in range(num_bytes)
  )
  loss = model.loss(batches)
  assert loss == pytest.approx(expected / num_bytes, rel=1e-13)


def test_loss_on_real_text_is_between_its_bounds():
  # Uniform bytes cost log(256) nats; source text has far fewer likely pairs,
  # and a bigram model that beat 1.5 nats would have seen what it predicts.
  corpus = load_corpus()
  model = bigram.fit(tokens_lib.encode(corpus.train))
  loss = model.loss(
    tokens_lib.validation_batches(
      tokens_lib.encode(corpus.validation), num_rows=16, seq_len=256
    )
  )
  assert 1.5 < loss < 0.6 * math.log(256)


def test_too_little_text_is_refused():
  with pytest.raises(ValueError, match="1 bytes hold no pair"):
    bigram.fit(tokens_lib.encode(b"a"))
  model = bigram.fit(tokens_lib.encode(b"ab"))
  with pytest.raises(ValueError, match="0 bytes to predict"):
    model.loss([])
