"""A smoothed bigram model of bytes: the loss that a GPT has to beat."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from sojax.data import tokens as tokens_lib

_STRENGTHS = tuple(2.0**i for i in range(-4, 13))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Bigram:
  """Probabilities of each byte after each byte.

  p(b | a) = (count(a, b) + strength * p(b)) / (count(a) + strength), where
  p(b) = (count(b) + 1) / (count + 256): the counts are interpolated with the
  bytes' own frequencies, so nothing has probability 0.
  """

  log_probs: np.ndarray
  """Natural logarithms of p(b | a), float64 [256, 256], a first."""
  strength: float
  """Weight of p(b), in counts."""

  def loss(self, batches: Iterable[tokens_lib.Batch]) -> float:
    """Returns the mean of -log p over all unmasked targets, in nats.

    Args:
      batches: as from `sojax.data.validation_batches`.

    Raises:
      ValueError: if no target is unmasked.
    """
    total, count = 0.0, 0.0
    for batch in batches:
      tokens, mask = batch["tokens"], batch["loss_mask"]
      losses = -self.log_probs[tokens[:, :-1], tokens[:, 1:]]
      total += float(np.sum(losses * mask, dtype=np.float64))
      count += float(np.sum(mask, dtype=np.float64))
    if not count:
      raise ValueError("0 bytes to predict; give batches with unmasked targets")
    return total / count


def fit(tokens: np.ndarray) -> Bigram:
  """Counts bytes and chooses the strength of smoothing by those bytes alone.

  The strength is the one, of powers of two, under which each pair of the
  text is most probable given all the others (leave one out).

  Args:
    tokens: training bytes, uint8 [n], n at least 2.

  Raises:
    ValueError: if there are fewer than two bytes.
  """
  if tokens.size < 2:
    raise ValueError(f"{tokens.size} bytes hold no pair; give 2 or more")
  vocab = tokens_lib.VOCAB_SIZE
  pairs = tokens[:-1].astype(np.int32) * vocab + tokens[1:]
  counts = np.bincount(pairs, minlength=vocab * vocab).reshape(vocab, vocab)
  unigram = (np.bincount(tokens, minlength=vocab) + 1) / (tokens.size + vocab)
  strength = min(
    _STRENGTHS, key=lambda strength: _left_out_loss(counts, unigram, strength)
  )
  smoothed = _smooth(counts, counts.sum(1), unigram, strength)
  return Bigram(log_probs=np.log(smoothed), strength=strength)


def _smooth(
  counts: np.ndarray, totals: np.ndarray, unigram: np.ndarray, strength: float
) -> np.ndarray:
  return (counts + strength * unigram) / (totals[:, None] + strength)


def _left_out_loss(
  counts: np.ndarray, unigram: np.ndarray, strength: float
) -> float:
  """Sum of -log p of each pair, with that one occurrence not counted."""
  # Pairs that do not occur add nothing; 0 keeps their logarithm defined.
  others = np.maximum(counts - 1, 0)
  totals = np.maximum(counts.sum(1) - 1, 0)
  log_probs = np.log(_smooth(others, totals, unigram, strength))
  return -float(np.sum(counts * log_probs))
