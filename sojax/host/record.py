"""What takes one step of the kernels back: its arrays and their sizes."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sojax.plan.adamw import AdamScalars
from sojax.plan.records import codes_bytes, num_escapes, num_offsets

_ALIGNMENT = 64
_LEFT_OUT = -1


@dataclasses.dataclass(frozen=True)
class Taken:
  """The step that a record holds.

  Attributes:
    lengths: elements of each segment.
    scalars: the scalars of the step.
    grad_scale: what its gradients were multiplied by.
  """

  lengths: tuple[int, ...]
  scalars: AdamScalars
  grad_scale: float


class Record:
  """What takes one step of a list of segments back, every bit of it.

  A record is filled by `Pool.submit(RecordStep(...))` and used up by a Finish,
  an Undo or a Redo; then it can be filled again. Between submission and
  completion its arrays belong to the pool.

  For each parameter it holds three codes: how far estimates of mu, nu and p,
  computed from the state after the step, are off. Values whose code does not
  fit are kept as they were: these are the escapes. Parameters are recorded in
  chunks of 2^14 of a segment. A chunk whose escapes find no room is left out
  of the step, and those that come after it as well, until the Finish or Redo.

  Attributes:
    bytes_per_param: 3, or 2 with narrower codes for nu and p. Those escape
      sooner, above all in early steps.
    codes: uint8, `codes_bytes(lengths, bytes_per_param)`; starts at a multiple
      of 64 bytes.
    escapes: float32, of any length: room for so many escapes.
    offsets: int64, `num_offsets(lengths)`: where the escapes of each chunk
      start, or -1 for one that was left out; at the end their number.
    taken: the step that it holds; None if there is none.
  """

  def __init__(
    self,
    codes: np.ndarray,
    escapes: np.ndarray,
    offsets: np.ndarray,
    *,
    bytes_per_param: int,
  ):
    check_bytes_per_param(bytes_per_param)
    self.bytes_per_param = bytes_per_param
    self.codes = codes
    self.escapes = escapes
    self.offsets = offsets
    self.taken: Taken | None = None

  def num_escapes(self) -> int:
    """Returns how many escapes the record holds; wait for the step first."""
    return int(self.offsets[-1])

  def num_left_out(self) -> int:
    """Returns how many chunks were left out; wait for the step first."""
    return int(np.count_nonzero(self.offsets[:-1] == _LEFT_OUT))


def new_record(
  lengths: Sequence[int],
  *,
  bytes_per_param: int = 3,
  escape_bytes_per_param: float = 0.5,
  empty: Callable[[int, npt.DTypeLike], np.ndarray] | None = None,
  empty_escapes: Callable[[int, npt.DTypeLike], np.ndarray] | None = None,
) -> Record:
  """Allocates a record.

  Args:
    lengths: elements of each segment whose step it can hold.
    bytes_per_param: 3 or 2; see `Record`.
    escape_bytes_per_param: the cap on escapes, at 4 bytes each; on the average
      of all parameters. 12 is enough for any step.
    empty: gives memory: called with a length and a dtype, it returns an array
      aligned to 64 bytes (an Arena's method). None takes NumPy's.
    empty_escapes: likewise, for the escapes; None takes `empty`.

  Returns:
    A record that holds no step.

  Raises:
    ValueError: if `bytes_per_param` or `escape_bytes_per_param` is out of its
      range.
  """
  check_bytes_per_param(bytes_per_param)
  if not 0 <= escape_bytes_per_param <= 12:
    raise ValueError(
      f"escape_bytes_per_param={escape_bytes_per_param} must lie in [0, 12];"
      " 12 holds every value of every parameter"
    )
  empty = _aligned_empty if empty is None else empty
  offsets = empty(num_offsets(lengths), np.int64)
  offsets[-1] = 0
  return Record(
    empty(codes_bytes(lengths, bytes_per_param), np.uint8),
    (empty_escapes or empty)(
      num_escapes(lengths, escape_bytes_per_param), np.float32
    ),
    offsets,
    bytes_per_param=bytes_per_param,
  )


def check_bytes_per_param(bytes_per_param: int) -> None:
  """Raises ValueError unless there is such a form of records."""
  if bytes_per_param not in (2, 3):
    raise ValueError(
      f"bytes_per_param={bytes_per_param} must be 2 or 3, the forms of records"
    )


def _aligned_empty(num_elems: int, dtype: npt.DTypeLike) -> np.ndarray:
  dtype = np.dtype(dtype)
  block = np.empty(num_elems * dtype.itemsize + _ALIGNMENT, np.uint8)
  start = -block.ctypes.data % _ALIGNMENT
  return block[start : start + num_elems * dtype.itemsize].view(dtype)
