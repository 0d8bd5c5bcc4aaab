"""Sums of gradients and of squares, written to be read: the kernels' twins."""

import numpy as np

_CHUNK_ELEMS = 4096
_NUM_LANES = 16


def accumulate_float32(total: np.ndarray, grad: np.ndarray) -> np.ndarray:
  """Adds a gradient to a sum in float32.

  Args:
    total: the sum so far, float32, any shape.
    grad: the gradient, float32, float16 or bfloat16.

  Returns:
    The new sum, float32.
  """
  with np.errstate(all="ignore"):
    return total + grad.astype(np.float32)


def chunk_sums_of_squares(x: np.ndarray) -> np.ndarray:
  """Adds up squares in float64, in the one order that the kernels keep to.

  A chunk is 4096 elements. Its element i goes to lane i mod 16, in order, where
  the first is added to 0; then the upper half of the lanes is added to the
  lower half, until one is left.

  Args:
    x: float32 [n].

  Returns:
    float64 [ceil(n / 4096)].

  >>> chunk_sums_of_squares(np.full(4097, 2, np.float32)).tolist()
  [16384.0, 4.0]
  """
  num_chunks = -(-x.size // _CHUNK_ELEMS)
  padded = np.zeros(num_chunks * _CHUNK_ELEMS)
  with np.errstate(invalid="ignore"):
    padded[: x.size] = x
  squares = (padded * padded).reshape(
    -1, _CHUNK_ELEMS // _NUM_LANES, _NUM_LANES
  )
  lanes = np.zeros((num_chunks, _NUM_LANES))
  for i in range(squares.shape[1]):
    lanes = lanes + squares[:, i]
  for half in (8, 4, 2, 1):
    lanes = lanes[:, :half] + lanes[:, half:]
  return lanes[:, 0]
