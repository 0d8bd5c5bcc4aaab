"""Bytes as tokens, and batches of them that depend on the step alone.

Shapes: R rows of a batch, T tokens predicted in each row (seq_len).
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

VOCAB_SIZE = 256
"""Number of byte tokens."""

Batch = dict[str, np.ndarray]
"""A trainer's batch: "tokens" int32 [R, T+1], "loss_mask" float32 [R, T]."""


def encode(text: bytes) -> np.ndarray:
  """Turns text into byte tokens, uint8 [len(text)], without copying.

  >>> encode(b"abc")
  array([97, 98, 99], dtype=uint8)
  """
  return np.frombuffer(text, np.uint8)


def decode(tokens: np.ndarray) -> bytes:
  """Turns tokens of any integer dtype back into text.

  >>> decode(np.array([97, 98, 99]))
  b'abc'

  Raises:
    ValueError: if a token is no byte.
  """
  tokens = np.asarray(tokens)
  if tokens.size and (tokens.min() < 0 or tokens.max() >= VOCAB_SIZE):
    raise ValueError(
      f"tokens from {tokens.min()} to {tokens.max()} are no bytes; give "
      f"tokens from 0 to {VOCAB_SIZE - 1}"
    )
  return tokens.astype(np.uint8).tobytes()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BatchSampler:
  """Draws training batches: windows of the tokens at random places.

  A batch is a function of the seed and the step, and of nothing else, so a
  run that resumes needs to know its step only, and two processes that ask
  for the same step get the same rows.

  Raises:
    ValueError: if `num_rows` or `seq_len` is below 1, `seed` is negative, or
      the tokens do not hold one row.
  """

  tokens: np.ndarray
  """Tokens of any integer dtype, one-dimensional; kept, not copied."""
  num_rows: int
  """Rows of a batch."""
  seq_len: int
  """Tokens predicted in each row, T."""
  seed: int = 0
  """Chooses one of the sequences of batches."""

  def __post_init__(self):
    _check_shape(self.num_rows, self.seq_len)
    if self.seed < 0:
      raise ValueError(f"seed={self.seed} is negative; give 0 or more")
    if self.tokens.size < self.seq_len + 1:
      raise ValueError(
        f"{self.tokens.size} tokens do not hold one row of seq_len + 1 = "
        f"{self.seq_len + 1}; lower seq_len or give more text"
      )

  def batch(self, step: int) -> Batch:
    """Returns the batch of a step.

    Args:
      step: number of the step, from 0.

    Returns:
      {"tokens": int32 [R, T+1]}, newly allocated.
    """
    rng = np.random.default_rng((self.seed, step))
    last_start = self.tokens.size - self.seq_len - 1
    starts = rng.integers(last_start, size=self.num_rows, endpoint=True)
    index = starts[:, None] + np.arange(self.seq_len + 1)
    return {"tokens": self.tokens[index].astype(np.int32)}


def validation_batches(
  tokens: np.ndarray,
  *,
  num_rows: int,
  seq_len: int,
  max_batches: int | None = None,
) -> Iterator[Batch]:
  """Yields batches that predict every token but the first, once, in order.

  Row r of all rows predicts tokens r*T+1 to r*T+T. What the last batch lacks
  is filled with token 0 and masked out, so all batches have one shape.

  Args:
    tokens: tokens of any integer dtype, one-dimensional.
    num_rows: rows of a batch, R.
    seq_len: tokens predicted in each row, T.
    max_batches: stop after so many; None to reach the end.

  Yields:
    {"tokens": int32 [R, T+1], "loss_mask": float32 [R, T]}.

  Raises:
    ValueError: if `num_rows` or `seq_len` is below 1, or if there are fewer
      than two tokens.
  """
  _check_shape(num_rows, seq_len)
  if tokens.size < 2:
    raise ValueError(
      f"{tokens.size} validation tokens predict nothing; give 2 or more"
    )
  batch_tokens = num_rows * seq_len
  starts = range(0, tokens.size - 1, batch_tokens)
  for start in starts[:max_batches]:
    window = tokens[start : start + batch_tokens + 1]
    flat = np.zeros(batch_tokens + 1, np.int32)
    flat[: window.size] = window
    first = np.arange(num_rows)[:, None] * seq_len
    mask = np.arange(batch_tokens) < window.size - 1
    yield {
      "tokens": flat[first + np.arange(seq_len + 1)],
      "loss_mask": mask.reshape(num_rows, seq_len).astype(np.float32),
    }


def _check_shape(num_rows: int, seq_len: int) -> None:
  if num_rows < 1 or seq_len < 1:
    raise ValueError(
      f"num_rows={num_rows} and seq_len={seq_len} make no batch; give at "
      "least 1 of each"
    )
