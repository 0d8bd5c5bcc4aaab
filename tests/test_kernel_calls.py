"""Every operation, on arrays of every kind and at every place.

A call is refused before a byte has changed, or it does what the NumPy twins do
and changes nothing else. The oracle of which of the two is `Call.is_legal`.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojax.host.kernels import Pool
from sojax.host.operations import RecordStep
from sojax.host.record import Taken, new_record
from sojax.host.segments import Segment
from tests.kernel_calls import (
  OPERATIONS,
  RECORD,
  RECORD_FIELDS,
  TAKEN_BACK,
  WITH_RECORD,
  Call,
  check_result,
  states_of,
)
from tests.kernel_cases import (
  BF16,
  F16,
  F32,
  F64,
  GRAD_DTYPES,
  GRAD_SCALE,
  LAYOUTS,
  SCALARS,
  random_sums,
  state_of,
)

_LENGTHS = [0, 1, 2, 15, 16, 17, 33, 64, 131, 4095, 4096, 4097, 16385]
_DTYPES = [F64, F32, F16, BF16, *map(np.dtype, ("i2", "i4", "i8", "u1", ">f4"))]


def _astype(dtype):
  return lambda x: x.astype(dtype)


def _read_only(x):
  x = x.view()
  x.flags.writeable = False
  return x


FAULTS = {
  **{str(x): _astype(x) for x in _DTYPES},
  "strided": lambda x: np.repeat(x, 2)[::2],
  "reversed": lambda x: x.copy()[::-1],
  "2-D": lambda x: x.reshape(1, -1),
  "0-D": lambda x: np.zeros((), x.dtype),
  "short": lambda x: x[:-1],
  "long": lambda x: np.append(x, np.zeros(1, x.dtype)),
  "empty": lambda x: x[:0],
  "read-only": _read_only,
  "none": lambda x: None,
  "list": lambda x: x.tolist(),
  "scalar": lambda x: 3.0,
}


@st.composite
def arrays_of_segment(draw, operation, n, seed):
  """The arrays of a segment by field; with all that a layout allows."""
  grad_dtype = draw(st.sampled_from(GRAD_DTYPES))
  if OPERATIONS[operation][1] is Segment:
    state = state_of(
      draw(st.sampled_from(LAYOUTS)),
      n,
      seed,
      with_sum=draw(st.booleans()),
      with_squares=draw(st.booleans()),
    )
    segment = state.segment()
    names = [x.name for x in dataclasses.fields(segment)]
    return {name: getattr(segment, name) for name in names}
  sums = random_sums(n, grad_dtype, draw(st.booleans()), seed)
  if operation == "narrow":
    return {"p": sums.total, "weight_out": np.zeros(n, grad_dtype)}
  if operation == "norm":
    sumsq = random_sums(n).sumsq
    total = sums.total if draw(st.booleans()) else None
    return {"grad": sums.grad, "sumsq_out": sumsq, "sum": total}
  return dict(sum_inout=sums.total, grad=sums.grad, sumsq_out=sums.sumsq)


@st.composite
def legal_arrays(draw, operation, lengths, form):
  arrays = {}
  for i, n in enumerate(lengths):
    fields = draw(arrays_of_segment(operation, n, i))
    arrays |= {(i, k): x for k, x in fields.items() if x is not None}
  if operation in WITH_RECORD:
    cap = draw(st.sampled_from([0, 12]))
    record = new_record(
      lengths, bytes_per_param=form, escape_bytes_per_param=cap
    )
    for name in RECORD_FIELDS:
      array = getattr(record, name)
      arrays[RECORD, name] = np.zeros_like(array)
  return arrays


class Place:
  """A block of memory that arrays are moved to."""

  def __init__(self, num_bytes):
    self.bytes = np.full(num_bytes + 64, 0xA5, np.uint8)
    start = -self.bytes.ctypes.data % 64
    self.bytes = self.bytes[start : start + num_bytes]

  def put(self, array, start):
    """Returns a copy of an array that starts at a byte, cut at the end."""
    start = min(max(start, 0), self.bytes.size - array.nbytes)
    copy = self.bytes[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


@st.composite
def calls(draw, operation):
  """A call and the block that its arrays lie in.

  They follow each other with or without a gap, at any byte; then up to two
  move onto others and up to two get a fault.
  """
  size = draw(st.integers(1, 3))
  lengths = tuple(draw(st.sampled_from(_LENGTHS)) for _ in range(size))
  form = draw(st.sampled_from([2, 3]))
  arrays = draw(legal_arrays(operation, lengths, form))
  place = Place(sum(x.nbytes + 128 for x in arrays.values()) + 128)
  starts, end = {}, draw(st.integers(0, 63))
  for key in draw(st.permutations(list(arrays))):
    starts[key] = end
    if key == (RECORD, "codes"):
      starts[key] = -(-end // 64) * 64
    end = starts[key] + arrays[key].nbytes
    end += draw(st.sampled_from([0, 0, 1, 4, 63]))
  keys = list(arrays)
  for key in draw(st.lists(st.sampled_from(keys), max_size=2)):
    onto = draw(st.sampled_from(keys))
    size_bytes = arrays[onto].nbytes
    shift = draw(st.sampled_from([-1, 0, 1, 4, size_bytes - 1, size_bytes]))
    starts[key] = starts[onto] + shift
  for key in keys:
    arrays[key] = place.put(arrays[key], starts[key])
  faults = st.tuples(st.sampled_from(keys), st.sampled_from(list(FAULTS)))
  for key, fault in draw(
    st.lists(faults, max_size=2, unique_by=lambda x: x[0])
  ):
    with np.errstate(all="ignore"):
      arrays[key] = FAULTS[fault](arrays[key])
  return Call(operation, lengths, arrays, form), place


@pytest.fixture(scope="module")
def pool():
  with Pool(2) as pool:
    yield pool


def contents(call, place):
  arrays = [x for x in call.arrays.values() if isinstance(x, np.ndarray)]
  return [x.tobytes() for x in (place.bytes, *arrays)]


def check_only_written(call, place, before):
  """No byte of the block has changed but of arrays that are written."""
  may_change = np.zeros(place.bytes.size, bool)
  for array in call.written().values():
    start = array.ctypes.data - place.bytes.ctypes.data
    if 0 <= start <= place.bytes.size:
      may_change[start : start + array.nbytes] = True
  changed = place.bytes != np.frombuffer(before, np.uint8)
  assert not np.any(changed & ~may_change)


def record_first(pool, call):
  """Takes the step that a legal call takes back or commits."""
  copies = {key: x.copy() for key, x in call.arrays.items() if x is not None}
  recorded = Call("record", call.lengths, copies, call.form)
  record = new_record(call.lengths, bytes_per_param=call.form)
  copies[RECORD, "codes"] = record.codes
  record = recorded.record()
  operation = RecordStep(recorded.segments(), SCALARS, GRAD_SCALE, record)
  pool.submit(operation).wait()
  for key in recorded.written():
    array = call.arrays[key]
    was_writeable = array.flags.writeable
    array.flags.writeable = True
    array[:] = copies[key]
    array.flags.writeable = was_writeable


def check_refused(pool, call, place, record):
  before = contents(call, place)
  taken = None if record is None else record.taken
  with pytest.raises((TypeError, ValueError)):
    pool.submit(call.build(record)).wait()
  assert contents(call, place) == before
  assert record is None or record.taken is taken


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_call_is_refused_or_does_what_the_twins_do(pool, operation):
  outcomes = {True: 0, False: 0}

  @settings(max_examples=400)
  @given(case=calls(operation))
  def check(case):
    call, place = case
    legal = call.is_legal()
    outcomes[legal] += 1
    record = call.record() if operation in WITH_RECORD else None
    if record is not None and operation in TAKEN_BACK:
      record.taken = Taken(call.lengths, SCALARS, GRAD_SCALE)
    if not legal:
      check_refused(pool, call, place, record)
      return
    states = states_of(call)
    if operation in TAKEN_BACK:
      record_first(pool, call)
    block = place.bytes.tobytes()
    try:
      pool.submit(call.build(record)).wait()
    except RuntimeError:
      # The codes were written over what else is there.
      assert not call.has_record_apart()
    check_only_written(call, place, block)
    if record is None or call.has_record_apart():
      check_result(call, states, record)
    if record is not None:
      assert (record.taken is not None) == (operation == "record")

  check()
  # Both happen often enough to mean something.
  assert min(outcomes.values()) > 50
