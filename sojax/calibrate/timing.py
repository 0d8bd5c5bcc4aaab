"""Seconds of what is run again and again, in bounded time."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

_MIN_RUNS = 3
_MAX_RUNS = 100
# Eight times the cache that the cores of an EPYC share, 32 MiB.
_COLD_BYTES = 1 << 28
# Below 512 KiB they fit into it; but there a transfer's 50 us are its dispatch.
_MOST_COPIES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
  """How much is measured, and for how long.

  With these values it takes about a minute on two cores, and at most five GiB.

  Attributes:
    seconds: for each figure of the device, its links and its stages, but for
      the three runs that there are at least.
    matrix_dims: of the square matrices that are multiplied. Larger ones of a
      dtype are left out once one product takes longer than `seconds`.
    transfer_bytes: sizes of transfers.
    device_bytes: what the device's memory streams over.
    host_elems: parameters that the host's operations work on; so many that they
      do not fit its caches.
    host_rounds: runs of each of them.
  """

  seconds: float = 0.25
  matrix_dims: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
  transfer_bytes: tuple[int, ...] = tuple(1 << k for k in range(16, 29))
  device_bytes: int = 1 << 28
  host_elems: int = 1 << 25
  host_rounds: int = 9


def cold_copies(num_bytes: int) -> int:
  """Returns of how many arrays the next in turn is in no cache, or hardly.

  Args:
    num_bytes: the size of each.

  >>> cold_copies(1 << 27), cold_copies(1 << 30)
  (3, 1)
  """
  return min(_COLD_BYTES // max(num_bytes, 1) + 1, _MOST_COPIES)


def median_s(
  run: Callable[[Any], object],
  budget_s: float,
  prepare: Callable[[], Any] = lambda: None,
) -> float:
  """Returns the median seconds of a call, after one that does not count.

  Args:
    run: what is timed; takes what `prepare` returned.
    budget_s: seconds after which no more runs are begun.
    prepare: what comes before each run, not timed.
  """
  run(prepare())
  seconds: list[float] = []
  start_s = time.perf_counter()
  while len(seconds) < _MIN_RUNS or (
    time.perf_counter() - start_s < budget_s and len(seconds) < _MAX_RUNS
  ):
    prepared = prepare()
    before_s = time.perf_counter()
    run(prepared)
    seconds.append(time.perf_counter() - before_s)
  return statistics.median(seconds)
