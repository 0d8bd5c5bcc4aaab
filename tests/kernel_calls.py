"""Operations on generated arrays: which are legal, and what they must do.

Legal is a plain reading of sojax/host/segments.py and record.py.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from sojax.host.kernels import CHUNK_ELEMS
from sojax.host.operations import (
  Accumulate,
  AdamwStep,
  Finish,
  Narrow,
  Norm,
  RecordStep,
  Redo,
  Undo,
  Widen,
)
from sojax.host.record import Record, codes_bytes, num_offsets
from sojax.host.segments import (
  AccumulateSegment,
  NarrowSegment,
  NormSegment,
  Segment,
)
from sojax.reference.accumulate import (
  accumulate_float32,
  chunk_sums_of_squares,
)
from tests.kernel_cases import (
  BF16,
  F32,
  F64,
  GRAD_DTYPES,
  GRAD_SCALE,
  LAYOUTS,
  ROUND,
  SCALARS,
  Layout,
  State,
  SumState,
  assert_same_floats,
  assert_same_state,
  assert_same_sums,
)

NEW_SCALE = 0.11
RECORD_CHUNK_ELEMS = 1 << 14
# Of each operation: its class, that of its segments.
OPERATIONS = {
  "step": (AdamwStep, Segment),
  "record": (RecordStep, Segment),
  "finish": (Finish, Segment),
  "undo": (Undo, Segment),
  "redo": (Redo, Segment),
  "widen": (Widen, AccumulateSegment),
  "accumulate": (Accumulate, AccumulateSegment),
  "norm": (Norm, NormSegment),
  "narrow": (Narrow, NarrowSegment),
}
WITH_RECORD = ("record", "finish", "undo", "redo")
TAKEN_BACK = WITH_RECORD[1:]
RECORD = "record"
RECORD_FIELDS = ("codes", "escapes", "offsets")
_OPTIONAL = {
  Segment: ("weight_out", "p_low_inout", "sum", "sumsq_out"),
  AccumulateSegment: ("sumsq_out",),
  NormSegment: ("sum",),
  NarrowSegment: (),
}
_DTYPES = {
  "grad": GRAD_DTYPES,
  "weight_out": GRAD_DTYPES,
  "sumsq_out": [F64],
  "p_low_inout": [np.dtype(np.int16)],
  "codes": [np.dtype(np.uint8)],
  "offsets": [np.dtype(np.int64)],
}


@dataclasses.dataclass
class Call:
  """An operation, not yet submitted.

  Attributes:
    operation: one of OPERATIONS.
    lengths: elements of each segment as they were meant to be.
    arrays: by (number of the segment or RECORD, field); mostly arrays.
    form: bytes per parameter of the record.
  """

  operation: str
  lengths: tuple[int, ...]
  arrays: dict
  form: int = 3

  def segment_class(self):
    return OPERATIONS[self.operation][1]

  def fields(self, index) -> dict[str, Any]:
    """The fields of a segment by name; None where there is none."""
    names = [x.name for x in dataclasses.fields(self.segment_class())]
    return {name: self.arrays.get((index, name)) for name in names}

  def segments(self):
    make = self.segment_class()
    return [make(**self.fields(i)) for i in range(len(self.lengths))]

  def record(self):
    arrays = [self.arrays[RECORD, name] for name in RECORD_FIELDS]
    return Record(*arrays, bytes_per_param=self.form)

  def build(self, record):
    """The operation; with a record if it has one."""
    arguments = {
      "step": (SCALARS, GRAD_SCALE),
      "record": (SCALARS, GRAD_SCALE, record),
      "finish": (record,),
      "undo": (record,),
      "redo": (record, NEW_SCALE),
    }.get(self.operation, ())
    return OPERATIONS[self.operation][0](self.segments(), *arguments)

  def is_written(self, key):
    part, field = key
    if part == RECORD:
      return self.operation == "record"
    return field.endswith(("_inout", "_out"))

  def written(self):
    """What may change, by key."""
    return {
      key: array
      for key, array in self.arrays.items()
      if self.is_written(key) and isinstance(array, np.ndarray)
    }

  def is_legal(self):
    return (
      all(map(self._is_legal_array, self.arrays))
      and all(map(self._is_legal_segment, range(len(self.lengths))))
      and (self.operation not in WITH_RECORD or self._is_legal_record())
      and not self._overlaps()
    )

  def has_record_apart(self):
    """Whether no array of the record shares bytes with one of a segment."""
    return not any(
      _share_bytes(array, other)
      for (part, _), array in self.arrays.items()
      for (other_part, _), other in self.arrays.items()
      if part == RECORD != other_part
    )

  def _is_legal_array(self, key):
    part, field = key
    array = self.arrays[key]
    if array is None:
      return part != RECORD and field in _OPTIONAL[self.segment_class()]
    if not isinstance(array, np.ndarray):
      return False
    dtypes = _DTYPES.get(field, [F32])
    if (
      field == "p_inout" and self.arrays.get((part, "p_low_inout")) is not None
    ):
      dtypes = [BF16]
    return (
      array.ndim == 1
      and array.flags.c_contiguous
      and (array.flags.writeable or not self.is_written(key))
      and array.dtype in dtypes
    )

  def _is_legal_segment(self, index):
    fields = self.fields(index)
    arrays = {k: x for k, x in fields.items() if x is not None}
    sumsq = arrays.pop("sumsq_out", None)
    sizes = {x.size for x in arrays.values()}
    if len(sizes) != 1:
      return False
    (n,) = sizes
    if sumsq is not None and sumsq.size != -(-n // CHUNK_ELEMS):
      return False
    if self.segment_class() is not Segment:
      return True
    weight = fields["weight_out"]
    layout = Layout(
      fields["grad"].dtype,
      None if weight is None else weight.dtype,
      fields["p_low_inout"] is not None,
    )
    taken_back = self.operation in TAKEN_BACK
    return layout in LAYOUTS and not (taken_back and n != self.lengths[index])

  def _is_legal_record(self):
    lengths = [self.arrays[i, "p_inout"].size for i in range(len(self.lengths))]
    codes, _, offsets = (self.arrays[RECORD, x] for x in RECORD_FIELDS)
    return (
      codes.size == codes_bytes(lengths, self.form)
      and (codes.size == 0 or codes.ctypes.data % 64 == 0)
      and offsets.size == num_offsets(lengths)
    )

  def _overlaps(self):
    return any(
      (self.is_written(a) or self.is_written(b))
      and _share_bytes(self.arrays[a], self.arrays[b])
      for a, b in itertools.combinations(self.arrays, 2)
    )


def _share_bytes(a, b):
  """Of contiguous arrays."""
  if a is None or b is None or not a.nbytes or not b.nbytes:
    return False
  start_a, start_b = a.ctypes.data, b.ctypes.data
  return max(start_a, start_b) < min(start_a + a.nbytes, start_b + b.nbytes)


def states_of(call) -> list[Any]:
  """Copies of the arrays of each segment, as the twins take them."""
  return [_state_of(call.fields(i)) for i in range(len(call.lengths))]


def _state_of(fields: dict[str, Any]) -> Any:
  copies: dict[str, Any] = {
    k: None if x is None else x.copy() for k, x in fields.items()
  }
  if "mu_inout" in copies:
    return State(*(copies[x.name] for x in dataclasses.fields(Segment)))
  if "sum_inout" in copies:
    return SumState(copies["sum_inout"], copies["grad"], copies["sumsq_out"])
  return copies


def check_result(call, before, record):
  """The arrays hold what the twins compute from those before."""
  for i, (old, new) in enumerate(zip(before, states_of(call), strict=True)):
    if call.operation in ("widen", "accumulate"):
      assert_same_sums(new, old.twin(call.operation))
    elif call.operation == "norm":
      _check_norm(new, old)
    elif call.operation == "narrow":
      expected = ROUND[old["weight_out"].dtype](old["p"])
      assert_same_weights(new["weight_out"], expected)
    elif call.operation == "undo":
      for name in ("p", "mu", "nu", "p_low"):
        x, y = getattr(new, name), getattr(old, name)
        assert x is None if y is None else x.tobytes() == y.tobytes()
    elif call.operation == "record":
      _check_recorded(new, old, _left_out(call, record, i))
    else:
      scale = NEW_SCALE if call.operation == "redo" else GRAD_SCALE
      assert_same_state(new, old.twin(grad_scale=scale))


def _check_norm(new, old):
  with np.errstate(all="ignore"):
    grad = old["grad"].astype(F32)
    if old["sum"] is not None:
      grad = accumulate_float32(old["sum"], grad)
  assert_same_floats(new["sumsq_out"], chunk_sums_of_squares(grad))


def assert_same_weights(actual, expected):
  if expected.dtype == F32:
    assert_same_floats(actual, expected)
  else:
    assert actual.tobytes() == expected.tobytes()


def _left_out(call, record, index):
  """Of each element of a segment, whether its step was left out."""
  chunks = [-(-n // RECORD_CHUNK_ELEMS) for n in call.lengths]
  first = sum(chunks[:index])
  left_out = record.offsets[first : first + chunks[index]] == -1
  return np.repeat(left_out, RECORD_CHUNK_ELEMS)[: call.lengths[index]]


def _check_recorded(new, old, left_out):
  expected = old.twin()
  for name in ("p", "mu", "nu", "p_low", "weight"):
    array = getattr(expected, name)
    if array is not None:
      # What is in the weights of such a chunk is not specified.
      source = new if name == "weight" else old
      array[left_out] = getattr(source, name)[left_out]
  assert_same_state(new, expected)
