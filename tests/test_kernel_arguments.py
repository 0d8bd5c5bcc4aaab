"""What the kernels refuse, and that nothing is changed then.

Oracle: a quadratic search for overlaps.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojax.host.kernels import CHUNK_ELEMS, Pool
from sojax.host.operations import (
  Accumulate,
  AdamwStep,
  Narrow,
  Norm,
  RecordStep,
  Widen,
)
from sojax.host.record import new_record
from sojax.host.segments import NarrowSegment, NormSegment, Segment
from sojax.plan.adamw import AdamScalars
from tests.kernel_cases import (
  BF16,
  F16,
  F32,
  F64,
  GRAD_DTYPES,
  GRAD_SCALE,
  SCALARS,
  SUM_METHODS,
  assert_refused,
  assert_same_state,
  random_state,
  random_sums,
)

_STEP_FIELDS = ("p_inout", "mu_inout", "nu_inout", "grad", "weight_out")
_SUM_FIELDS = ("sum_inout", "grad", "sumsq_out")
_SPLIT_FIELDS = (
  *("p_inout", "p_low_inout", "mu_inout", "nu_inout"),
  *("grad", "sum", "sumsq_out"),
)
_FIELDS = {
  "adamw_step": _STEP_FIELDS,
  "record": _SPLIT_FIELDS,
  "widen": _SUM_FIELDS,
  "accumulate": _SUM_FIELDS,
  "norm": ("grad", "sum", "sumsq_out"),
  "narrow": ("p", "weight_out"),
}
_KERNEL_FIELDS = [
  (x, field) for x, fields in _FIELDS.items() for field in fields
]
# Others are float32.
_DTYPES = {
  "grad": GRAD_DTYPES,
  "weight_out": GRAD_DTYPES,
  "sumsq_out": [F64],
  "p_low_inout": [np.int16],
  ("record", "p_inout"): [BF16],
}
_READ_ONLY = ("grad", "sum", "p")


def dtypes_of(kernel, field):
  """The names of the dtypes that are no fault."""
  dtypes = _DTYPES.get((kernel, field), _DTYPES.get(field, [F32]))
  return [np.dtype(x).name for x in dtypes]


def segment_for(kernel, n, seed=0):
  if kernel == "adamw_step":
    return random_state(n, F32, F32, seed).segment()
  if kernel == "record":
    return random_state(
      n, F32, None, seed, split=True, with_sum=True, with_squares=True
    ).segment()
  sums = random_sums(n, F32, True, seed)
  if kernel == "norm":
    return NormSegment(sums.grad, sums.sumsq, sums.total)
  if kernel == "narrow":
    return NarrowSegment(sums.grad, sums.total)
  return sums.segment()


@dataclasses.dataclass
class Arrays:
  """What must not change when a call is refused."""

  segment: object

  def arrays(self):
    return [x for x in self.segment.fields() if x is not None]


def call(pool, kernel, segments):
  pool.submit(operation_on(kernel, segments)).wait()


def operation_on(kernel, segments):
  if kernel == "adamw_step":
    return AdamwStep(segments, SCALARS, GRAD_SCALE)
  if kernel == "record":
    record = new_record([np.size(x.p_inout) for x in segments])
    return RecordStep(segments, SCALARS, GRAD_SCALE, record)
  return {
    "widen": Widen,
    "accumulate": Accumulate,
    "norm": Norm,
    "narrow": Narrow,
  }[kernel](segments)


def strided(array):
  return np.repeat(array, 2)[::2]


def read_only(array):
  array = array.copy()
  array.flags.writeable = False
  return array


def byte_swapped(array):
  return array.astype(array.dtype.newbyteorder(">"))


# What is done to a field, the error, a word of its message.
FAULTS = {
  "float64": (lambda x: x.astype(F64), ValueError, "dtype float64"),
  "float32": (lambda x: x.astype(F32), ValueError, "dtype float32"),
  "float16": (lambda x: x.astype(F16), ValueError, "dtype float16"),
  "bfloat16": (lambda x: x.astype(BF16), ValueError, "dtype bfloat16"),
  "int32": (lambda x: x.astype(np.int32), ValueError, "dtype int32"),
  "uint16": (lambda x: np.ones(x.size, np.uint16), ValueError, "dtype uint16"),
  "bytes": (lambda x: x.view("V2"), ValueError, ""),
  "swapped": (byte_swapped, ValueError, "dtype >"),
  "strided": (strided, ValueError, "stride"),
  "reversed": (lambda x: x[::-1], ValueError, "stride"),
  "2-D": (lambda x: x.reshape(1, -1), ValueError, "dimensions"),
  "0-D": (lambda x: np.array(x[0]), ValueError, "dimensions"),
  "short": (lambda x: x[:-1], ValueError, "elements"),
  "long": (lambda x: np.append(x, x[:1]), ValueError, "elements"),
  "empty": (lambda x: x[:0], ValueError, "elements"),
  "list": (lambda x: x.tolist(), TypeError, "list"),
  "scalar": (lambda x: 3.0, TypeError, "float"),
  "jax": (lambda x: jnp.array(x, F32, copy=True), TypeError, "numpy.ndarray"),
}
_CASES = [
  (kernel, field, fault)
  for (kernel, field), fault in itertools.product(_KERNEL_FIELDS, FAULTS)
  if fault not in dtypes_of(kernel, field)
]


@pytest.fixture(scope="module")
def pool():
  with Pool(2) as pool:
    yield pool


@settings(max_examples=500)
@given(
  case=st.sampled_from(_CASES),
  index=st.integers(0, 2),
  # Two chunks or more: an array of one element has no stride.
  n=st.integers(CHUNK_ELEMS + 1, 2 * CHUNK_ELEMS + 1),
)
def test_a_faulty_array_is_an_error_that_names_it(pool, case, index, n):
  kernel, field, fault = case
  segments = [segment_for(kernel, n, seed=i) for i in range(3)]
  states = [Arrays(x) for x in segments]
  change, error, word = FAULTS[fault]
  faulty = change(getattr(segments[index], field))
  segments[index] = dataclasses.replace(segments[index], **{field: faulty})
  # The first field gives the length, so that the next one differs.
  first, second = _FIELDS[kernel][:2]
  name = second if (field, word) == (first, "elements") else field
  match = rf"segments\[{index}\]\.{name} .*{word}"
  assert_refused(lambda: call(pool, kernel, segments), states, error, match)


@pytest.mark.parametrize("kernel, field", _KERNEL_FIELDS)
def test_only_what_is_not_written_may_be_read_only(pool, kernel, field):
  segment = segment_for(kernel, 9)
  changed = {field: read_only(getattr(segment, field))}
  segments = [dataclasses.replace(segment, **changed)]
  if field in _READ_ONLY:
    call(pool, kernel, segments)
    return
  match = f"{field} is read-only"
  assert_refused(
    lambda: call(pool, kernel, segments), [Arrays(segment)], ValueError, match
  )


@pytest.mark.parametrize("kernel", SUM_METHODS)
@pytest.mark.parametrize(
  "n, num_chunks",
  [(0, 0), (1, 1), (4095, 1), (4096, 1), (4097, 2), (8192, 2), (8193, 3)],
)
@pytest.mark.parametrize("size", range(5))
def test_there_is_one_sum_of_squares_for_each_chunk(
  pool, kernel, n, num_chunks, size
):
  state = dataclasses.replace(random_sums(n), sumsq=np.zeros(size))
  segments = [state.segment()]
  if size == num_chunks:
    call(pool, kernel, segments)
    assert np.all(state.sumsq > 0)
    return
  match = f"sumsq_out has {size} elements; give {num_chunks}, .* the {n} el"
  assert_refused(
    lambda: call(pool, kernel, segments), [state], ValueError, match
  )


@pytest.mark.parametrize("kernel", SUM_METHODS)
@pytest.mark.parametrize("shared_bytes", [0, 1])
def test_arrays_of_sums_may_not_share_bytes_if_one_is_written(
  pool, kernel, shared_bytes
):
  arrays = [(i, field) for i in range(2) for field in _SUM_FIELDS]
  for (i, first), (j, second) in itertools.combinations(arrays, 2):
    states = [random_sums(10, seed=seed) for seed in range(2)]
    segments = [state.segment() for state in states]
    block = np.zeros(100, np.uint8)
    start = 0
    for k, field in ((i, first), (j, second)):
      array = getattr(segments[k], field)
      moved = block[start : start + array.nbytes].view(array.dtype)
      segments[k] = dataclasses.replace(segments[k], **{field: moved})
      start = array.nbytes - shared_bytes
    if shared_bytes == 0 or first == second == "grad":
      call(pool, kernel, segments)
      continue
    match = rf"\[{i}\]\.{first} and .*\[{j}\]\.{second} overlap by 1 bytes"
    with pytest.raises(ValueError, match=match):
      call(pool, kernel, segments)
    assert not block.any()


@st.composite
def layouts(draw):
  """Starts and lengths in bytes of the arrays of up to three segments.

  They lie one after the other in any order, then up to three of them move
  onto others.
  """
  num_segments = draw(st.integers(1, 3))
  elems = draw(
    st.lists(st.integers(0, 9), min_size=num_segments, max_size=num_segments)
  )
  num_bytes = [4 * n for n in elems for _ in _STEP_FIELDS]
  starts = [0] * len(num_bytes)
  end = 0
  for i in draw(st.permutations(range(len(num_bytes)))):
    starts[i] = end
    end += num_bytes[i] + draw(st.sampled_from([0, 0, 1, 4]))
  for _ in range(draw(st.integers(0, 3))):
    moved = draw(st.sampled_from(range(len(starts))))
    onto = draw(st.sampled_from(range(len(starts))))
    starts[moved] = max(0, starts[onto] + draw(st.integers(-8, 40)))
  return starts, num_bytes


def step_with_layout(pool, starts, num_bytes):
  """Steps arrays of zeros laid out in one block, if nothing overlaps."""
  block = np.zeros(1000, np.uint8)
  arrays = [
    block[start : start + size].view(F32)
    for start, size in zip(starts, num_bytes, strict=True)
  ]
  segments = [Segment(*arrays[i : i + 5]) for i in range(0, len(arrays), 5)]
  pool.adamw_step(segments, SCALARS, 1.0)


@settings(max_examples=300)
@given(layout=layouts())
def test_overlap_is_an_error_exactly_where_a_written_array_shares_bytes(
  pool, layout
):
  """The oracle compares all pairs of arrays."""
  starts, num_bytes = layout
  is_written = [_STEP_FIELDS[i % 5] != "grad" for i in range(len(starts))]
  overlaps = any(
    (is_written[i] or is_written[j])
    and max(starts[i], starts[j])
    < min(starts[i] + num_bytes[i], starts[j] + num_bytes[j])
    for i, j in itertools.combinations(range(len(starts)), 2)
  )
  if overlaps:
    with pytest.raises(ValueError, match="overlap by [0-9]+ bytes"):
      step_with_layout(pool, starts, num_bytes)
  else:
    step_with_layout(pool, starts, num_bytes)


def test_an_overlap_behind_a_nested_gradient_is_found(pool):
  # The second gradient lies in the first, which is fine; what is written
  # after it still overlaps the first, by name and by bytes.
  num_bytes = [40] * 5 + [4] * 5
  starts = [100, 200, 300, 0, 400, 38, 500, 600, 8, 700]
  match = r"segments\[0\]\.grad and segments\[1\]\.p_inout overlap by 2 bytes"
  with pytest.raises(ValueError, match=match):
    step_with_layout(pool, starts, num_bytes)


def test_segments_may_share_a_gradient(pool):
  first = random_state(50, seed=0)
  second = dataclasses.replace(random_state(50, seed=1), grad=first.grad)
  expected = [first.twin(), second.twin()]
  pool.adamw_step([first.segment(), second.segment()], SCALARS, GRAD_SCALE)
  assert_same_state(first, expected[0])
  assert_same_state(second, expected[1])


def test_scalars_are_numbers(pool):
  state = random_state(3)
  scalars = dataclasses.replace(SCALARS, b1="0.9")
  with pytest.raises(TypeError):
    pool.adamw_step([state.segment()], scalars, 1.0)
  with pytest.raises((TypeError, ValueError)):
    pool.adamw_step([state.segment()], SCALARS, "one")


def test_the_scalars_of_the_spec_are_those_of_the_kernel():
  names = [field.name for field in dataclasses.fields(AdamScalars)]
  assert names == ["b1", "b2", "one_minus_b1", "one_minus_b2", *"krsd", "eps"]
