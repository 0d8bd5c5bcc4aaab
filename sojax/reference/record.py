"""Records of AdamW steps in NumPy: the twins of the kernels that take back.

A record of a chunk is what the kernels write: codes, and the values that no
code fits. Nothing here is fast.
"""

import dataclasses

import ml_dtypes
import numpy as np

from sojax.plan.adamw import AdamScalars
from sojax.reference.adamw import adamw_float32, move_float32

_GROUP_ELEMS = 64
_LARGEST = np.finfo(np.float32).max
# The largest code of mu, nu and p, by the bytes of a parameter's codes.
_LIMITS = {3: (127, 127, 127), 2: (127, 7, 7)}


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkRecord:
  """The record of one chunk.

  Attributes:
    codes: uint8 [ceil(n / 64) * 64 * bytes_per_param], as the kernels write
      them: for each 64 elements the codes of mu, of nu and of p.
    escapes: float32; element by element, of each mu, nu and p.
  """

  codes: np.ndarray
  escapes: np.ndarray


def record_float32(
  before: tuple[np.ndarray, np.ndarray, np.ndarray],
  grad: np.ndarray,
  scalars: AdamScalars,
  grad_scale: float,
  bytes_per_param: int,
) -> ChunkRecord:
  """Records what takes a step back.

  Args:
    before: p, mu and nu before the step, float32 [n].
    grad: gradients, with earlier sums added, float32 [n].
    scalars: the scalars of the step.
    grad_scale: multiplies the gradients.
    bytes_per_param: 2 or 3.

  Returns:
    The record.
  """
  after = adamw_float32(*before, grad, scalars, grad_scale)
  values = _mu_nu_p(before)
  estimates = estimate_before(after, grad, scalars, grad_scale)
  codes = values.view(np.int32) - estimates.view(np.int32)
  limits = np.array(_LIMITS[bytes_per_param])
  # Of an int32, the absolute value may not be one.
  escapes = np.abs(codes.astype(np.int64)) > limits
  codes = np.where(escapes, -limits - 1, codes)
  return ChunkRecord(_pack(codes, bytes_per_param), values[escapes])


def undo_float32(
  after: tuple[np.ndarray, np.ndarray, np.ndarray],
  grad: np.ndarray,
  scalars: AdamScalars,
  grad_scale: float,
  record: ChunkRecord,
  bytes_per_param: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Restores the state before a step, every bit.

  Args:
    after: p, mu and nu after the step, float32 [n].
    grad: as for `record_float32`, like all that follow.
    scalars: the scalars of the step.
    grad_scale: multiplies the gradients.
    record: the record of the step.
    bytes_per_param: 2 or 3.

  Returns:
    p, mu and nu, new float32 arrays.
  """
  codes = _unpack(record.codes, grad.size, bytes_per_param)
  estimates = estimate_before(after, grad, scalars, grad_scale)
  values = (estimates.view(np.int32) + codes).view(np.float32)
  escapes = codes == -np.array(_LIMITS[bytes_per_param]) - 1
  values[escapes] = record.escapes
  mu, nu, p = (np.ascontiguousarray(x) for x in values.T)
  return p, mu, nu


def estimate_before(
  after: tuple[np.ndarray, np.ndarray, np.ndarray],
  grad: np.ndarray,
  scalars: AdamScalars,
  grad_scale: float,
) -> np.ndarray:
  """Inverts the formulas of a step, as well as float32 can.

  Args:
    after: p, mu and nu after the step, float32 [n].
    grad: gradients, float32 [n].
    scalars: the scalars of the step.
    grad_scale: multiplies the gradients.

  Returns:
    Estimates of mu, nu and p before it, float32 [n, 3]; never NaN.
  """
  c = {
    name: np.float32(getattr(scalars, name))
    for name in AdamScalars.__dataclass_fields__
  }
  p, mu, nu = after
  with np.errstate(all="ignore"):
    g = grad * np.float32(grad_scale)
    # What the step added, rounded as it was.
    mu_gain = c["one_minus_b1"] * g
    nu_gain = c["one_minus_b2"] * (g * g)
    move = move_float32(mu, nu, scalars)
    inverted = (c["b1"], c["b2"], 1.0 + np.float64(c["d"]))
    factors = [np.float32(1.0 / np.float64(x)) for x in inverted]
    estimates = [
      (new - gain) * factor
      for new, gain, factor in zip(
        (mu, nu, p), (mu_gain, nu_gain, move), factors, strict=True
      )
    ]
  estimates = np.stack(estimates, axis=1)
  return np.where(estimates < _LARGEST, estimates, _LARGEST)


def split_float32(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Splits floats so that the bits are (high << 16) + low.

  Args:
    x: float32 [n].

  Returns:
    high, bfloat16 [n], the nearest to x with ties away from zero (but for
    NaN), and low, int16 [n].

  >>> high, low = split_float32(np.float32([1.0, 1 + 2**-8]))
  >>> [float(h) for h in high], low.tolist()
  ([1.0, 1.0078125], [0, -32768])
  """
  bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
  high = ((bits + 0x8000) >> 16).astype(np.uint16)
  low = (bits & 0xFFFF).astype(np.uint16)
  return high.view(ml_dtypes.bfloat16), low.view(np.int16)


def join_float32(high: np.ndarray, low: np.ndarray) -> np.ndarray:
  """Returns the floats that were split, float32 [n]."""
  bits = (high.view(np.uint16).astype(np.int64) << 16) + low
  return bits.astype(np.uint32).view(np.float32)


def quiet_nan(x: np.ndarray) -> np.ndarray:
  """Returns the floats with the bits 0x7fc00000 for every NaN."""
  nan = np.uint32(0x7FC00000).view(np.float32)
  return np.where(np.isnan(x), nan, x)


def _mu_nu_p(state: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
  """Returns the three arrays of (p, mu, nu) as the columns mu, nu, p."""
  p, mu, nu = state
  return np.stack([mu, nu, p], axis=1)


def _pack(codes: np.ndarray, bytes_per_param: int) -> np.ndarray:
  """Stores codes, integers [n, 3], as the kernels do."""
  num_groups = -(-len(codes) // _GROUP_ELEMS)
  padded = np.zeros((num_groups * _GROUP_ELEMS, 3), np.int64)
  padded[: len(codes)] = codes
  groups = (padded & 0xFF).astype(np.uint8).reshape(num_groups, _GROUP_ELEMS, 3)
  columns = [groups[:, :, i] for i in range(3)]
  if bytes_per_param == 2:
    for i in (1, 2):
      even, odd = columns[i][:, 0::2] & 0xF, columns[i][:, 1::2] & 0xF
      columns[i] = (even | odd << 4).astype(np.uint8)
  return np.concatenate(columns, axis=1).reshape(-1)


def _unpack(stored: np.ndarray, n: int, bytes_per_param: int) -> np.ndarray:
  """Returns the codes that `_pack` stored, int32 [n, 3]."""
  groups = stored.reshape(-1, _GROUP_ELEMS * bytes_per_param)
  if bytes_per_param == 3:
    columns = np.split(groups, 3, axis=1)
  else:
    mu, *narrow = np.split(
      groups, [_GROUP_ELEMS, 3 * _GROUP_ELEMS // 2], axis=1
    )
    columns = [mu, *(_unpack_nibbles(x) for x in narrow)]
  codes = [x.reshape(-1)[:n].view(np.int8) for x in columns]
  return np.stack(codes, axis=1).astype(np.int32)


def _unpack_nibbles(stored: np.ndarray) -> np.ndarray:
  nibbles = np.stack([stored & 0xF, stored >> 4], axis=2)
  return ((nibbles ^ 8) - 8).astype(np.uint8).reshape(len(stored), -1)
