"""Host batches: checked, cut into micro-batches, and placed on the device."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from sojax.cluster.mesh import Placement
from sojax.plan.config import TrainConfig
from sojax.programs.spec import Targets
from sojax.runtime.step import MicroBatch

_KEYS = ("tokens", "loss_mask")


class Batches:
  """Turns a user's batch into micro-batches."""

  def __init__(
    self, config: TrainConfig, vocab_size: int | None, placement: Placement
  ):
    self._config = config
    self._vocab_size = vocab_size
    self._placement = placement
    self._rows = config.micro_batch * placement.num_data_ranks

  def for_step(
    self, batch: Mapping[str, np.ndarray], loss_scale: jax.Array
  ) -> list[MicroBatch]:
    """Places the batch of one optimizer step.

    Args:
      batch: "tokens", int32 [accumulation * micro_batch * data ranks,
        seq_len + 1], and perhaps "loss_mask", float32 or bool [.., seq_len],
        for the tokens that are predicted. Copied.
      loss_scale: what gradients are scaled by.

    Returns:
      One micro-batch per accumulation.

    Raises:
      ValueError: if the batch has another form, or a token is out of range.
    """
    rows = self._config.accumulation * self._rows
    tokens, mask = self._check(batch)
    if len(tokens) != rows:
      raise ValueError(
        f"tokens has {len(tokens)} rows; it must have accumulation *"
        f" micro_batch * data ranks = {rows}"
      )
    return self._place(tokens, mask, loss_scale)

  def for_evaluation(self, batch: Mapping[str, np.ndarray]) -> list[MicroBatch]:
    """Places a batch of any number of micro-batches; see `for_step`."""
    tokens, mask = self._check(batch)
    if len(tokens) == 0 or len(tokens) % self._rows:
      raise ValueError(
        f"tokens has {len(tokens)} rows; it must have a multiple of"
        f" micro_batch * data ranks = {self._rows}"
      )
    return self._place(tokens, mask, self._whole(np.float32(1.0)))

  def _check(
    self, batch: Mapping[str, np.ndarray]
  ) -> tuple[np.ndarray, np.ndarray]:
    unknown = sorted(set(batch) - set(_KEYS))
    if unknown or "tokens" not in batch:
      raise ValueError(
        f"batch has the keys {sorted(batch)}; it must have 'tokens' and may"
        " have 'loss_mask'"
      )
    tokens = _host_array(batch["tokens"], "tokens", ("int32",))
    seq_len = self._config.seq_len
    if tokens.ndim != 2 or tokens.shape[1] != seq_len + 1:
      raise ValueError(
        f"tokens has shape {tokens.shape}; it must be [rows, seq_len + 1 ="
        f" {seq_len + 1}]"
      )
    self._check_range(tokens)
    if "loss_mask" not in batch:
      return tokens, np.ones((len(tokens), seq_len), np.float32)
    mask = _host_array(batch["loss_mask"], "loss_mask", ("float32", "bool"))
    if mask.shape != (len(tokens), seq_len):
      raise ValueError(
        f"loss_mask has shape {mask.shape}; it must be {len(tokens), seq_len}"
      )
    if mask.dtype == np.float32 and np.any(mask < 0):
      raise ValueError(f"loss_mask holds {mask.min()}; it must not be negative")
    if not mask.any():
      raise ValueError("loss_mask is 0 everywhere; nothing can be learned")
    return tokens, mask.astype(np.float32)

  def _check_range(self, tokens: np.ndarray) -> None:
    if tokens.size == 0:
      return
    low, high = int(tokens.min()), int(tokens.max())
    bound = self._vocab_size
    if low < 0 or (bound is not None and high >= bound):
      raise ValueError(
        f"token {low if low < 0 else high} is out of range; tokens must lie in"
        f" [0, {'vocabulary size' if bound is None else bound})"
      )

  def _place(
    self, tokens: np.ndarray, mask: np.ndarray, loss_scale: jax.Array
  ) -> list[MicroBatch]:
    scale = np.float32(1.0 / np.sum(mask, dtype=np.float64))
    return [
      MicroBatch(
        self._divided(tokens[row : row + self._rows, :-1]),
        Targets(
          tokens=self._divided(tokens[row : row + self._rows, 1:]),
          mask=self._divided(mask[row : row + self._rows]),
          scale=self._whole(scale),
          loss_scale=loss_scale,
        ),
      )
      for row in range(0, len(tokens), self._rows)
    ]

  def _divided(self, rows: np.ndarray) -> jax.Array:
    """Divides rows among the ranks, in order.

    Copies first: JAX may keep using the memory that it is given.
    """
    return jax.device_put(np.array(rows), self._placement.rows)

  def _whole(self, value: np.float32) -> jax.Array:
    return jax.device_put(value, self._placement.device)


def _host_array(array: Any, name: str, dtypes: tuple[str, ...]) -> np.ndarray:
  if not isinstance(array, np.ndarray):
    raise ValueError(
      f"{name} is a {type(array).__name__}; it must be a NumPy array"
    )
  if str(array.dtype) not in dtypes:
    raise ValueError(
      f"{name} is {array.dtype}; it must be {' or '.join(dtypes)}"
    )
  return array
