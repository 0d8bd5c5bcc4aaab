"""Zeros by the threads of a pool: every byte is compared, and those beside."""

import ml_dtypes
import numpy as np
import pytest

from sojax.host.kernels import Pool
from sojax.host.operations import Accumulate, Narrow, Zero
from sojax.host.segments import AccumulateSegment, NarrowSegment

MIB = 1 << 20


@pytest.fixture(scope="module", params=[1, 2, 3])
def pool(request):
  with Pool(request.param) as pool:
    yield pool


@pytest.mark.parametrize("offset", [0, 1, 63, 2 * MIB - 1])
@pytest.mark.parametrize(
  "size", [0, 1, 4095, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB + 3]
)
def test_every_byte_becomes_zero_and_none_beside(pool, offset, size):
  block = np.full(10 * MIB, 255, np.uint8)
  start = -block.ctypes.data % (2 * MIB) + offset
  pool.zero([block[start : start + size]])
  expected = np.full(10 * MIB, 255, np.uint8)
  expected[start : start + size] = 0
  np.testing.assert_array_equal(block, expected)


def test_arrays_of_all_types_of_numbers_become_zero_together(pool):
  dtypes = (np.float32, ml_dtypes.bfloat16, np.int64, np.bool_, np.complex64)
  arrays = [np.ones(1000 + i, dtype) for i, dtype in enumerate(dtypes)]
  pool.zero(arrays)
  for array in arrays:
    assert not array.view(np.uint8).any()
  pool.zero([])


def test_zeros_come_after_what_reads_the_array_and_before_what_adds(pool):
  n = 1 << 20
  total, grad = np.full(n, 5, np.float32), np.full(n, 3, np.float32)
  before, after = np.zeros(n, np.float32), np.zeros(n, np.float32)
  for operation in (
    Narrow([NarrowSegment(total, before)]),
    Zero([total]),
    Accumulate([AccumulateSegment(total, grad)]),
    Narrow([NarrowSegment(total, after)]),
  ):
    completion = pool.submit(operation)
  completion.wait()
  assert np.all(before == 5) and np.all(total == 3) and np.all(after == 3)


def read_only():
  array = np.ones(10, np.float32)
  array.flags.writeable = False
  return array


@pytest.mark.parametrize(
  ("array", "error", "message"),
  [
    (np.ones(10)[::2], ValueError, "a stride of 16 bytes"),
    (np.ones((2, 5)), ValueError, "2 dimensions"),
    (read_only(), ValueError, "read-only"),
    (np.array([None, 1]), ValueError, "dtype object, which holds Python obj"),
    ([1.0, 2.0], TypeError, "is a list"),
  ],
  ids=["strided", "2-D", "read-only", "objects", "list"],
)
def test_a_faulty_array_is_an_error_and_none_is_changed(
  pool, array, error, message
):
  good, before = np.ones(10), np.copy(array)
  with pytest.raises(error, match=rf"segments\[1\]\.array_out .*{message}"):
    pool.zero([good, array])
  assert np.all(good == 1) and np.all(np.asarray(array) == before)


def test_arrays_that_overlap_are_an_error(pool):
  block = np.ones(100, np.uint8)
  with pytest.raises(ValueError, match="overlap by 1 bytes"):
    pool.zero([block[:50], block[49:]])
  assert np.all(block == 1)
