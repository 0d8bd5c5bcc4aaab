"""The slow twins of sums. Oracle: plain loops over Python's doubles."""

import numpy as np
import pytest

from sojax.reference.accumulate import (
  accumulate_float32,
  chunk_sums_of_squares,
)

F32 = np.dtype(np.float32)


def test_a_sum_is_rounded_once_to_float32():
  total = np.array([1.0, 1.0, 2.0**-149, -0.0, 3e38], F32)
  grad = np.array([2.0**-24, 3 * 2.0**-24, 2.0**-149, -0.0, 3e38], F32)
  actual = accumulate_float32(total, grad)
  assert actual.dtype == F32
  expected = [1.0, 1.0 + 2.0**-22, 2.0**-148, -0.0, np.inf]
  np.testing.assert_array_equal(actual, np.array(expected, F32))
  assert np.signbit(actual[3])


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 4095, 4096, 4097, 9000])
def test_squares_are_added_by_lane_and_lanes_by_halves(n):
  x = np.random.default_rng(n).standard_normal(n, F32)
  expected = []
  for start in range(0, n, 4096):
    lanes = [0.0] * 16
    for i, value in enumerate(x[start : start + 4096].tolist()):
      lanes[i % 16] += value * value
    while len(lanes) > 1:
      half = len(lanes) // 2
      lanes = [lanes[i] + lanes[half + i] for i in range(half)]
    expected += lanes
  actual = chunk_sums_of_squares(x)
  assert actual.dtype == np.float64
  assert actual.tolist() == expected


def test_what_is_not_finite_stays_in_its_chunk():
  x = np.ones(3 * 4096, F32)
  x[[4096, 4097, 8192]] = -np.inf, np.nan, np.inf
  actual = chunk_sums_of_squares(x)
  np.testing.assert_array_equal(actual, [4096.0, np.nan, np.inf])
