"""The host: what its operations on buckets reach, over the number of cores."""

import dataclasses
import statistics
import time

import ml_dtypes
import numpy as np

from sojax.calibrate.timing import Effort
from sojax.host.arena import Arena
from sojax.host.kernels import Pool, cpu_info
from sojax.host.operations import (
  Accumulate,
  AdamwStep,
  Finish,
  Narrow,
  Operation,
  RecordStep,
  Redo,
  Undo,
  Widen,
)
from sojax.host.record import Record, new_record
from sojax.host.segments import AccumulateSegment, NarrowSegment, Segment
from sojax.plan.adamw import AdamW, adam_scalars
from sojax.plan.hardware import HOST_OPERATIONS, Curve
from sojax.plan.records import codes_bytes, num_offsets

_SCALARS = adam_scalars(AdamW(learning_rate=1e-4, weight_decay=0.1), 100)
_BEFORE_REDO_SCALE = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class _Measured:
  """One of `HOST_OPERATIONS`.

  Attributes:
    operation: what is timed.
    num_bytes: what it reads and writes.
    before: what comes before it, not timed.
    after: what comes after it, not timed.
  """

  operation: Operation
  num_bytes: int
  before: Operation | None = None
  after: Operation | None = None


@dataclasses.dataclass(frozen=True)
class HostRates:
  """What the host reaches.

  Attributes:
    rates: bytes/s of each of `HOST_OPERATIONS`, over cores.
    bandwidth: the most that any of them reached.
    cores: how many there are.
  """

  rates: dict[str, Curve]
  bandwidth: float
  cores: int


def measure_host(effort: Effort) -> HostRates:
  """Runs every operation with one, two, four, .. and with all threads.

  On bfloat16 gradients and weights, round by round, so that a machine which
  changes its speed changes it for all.
  """
  cores = cpu_info().cores
  counts = [1 << k for k in range(cores.bit_length()) if 1 << k < cores]
  points: dict[str, list[tuple[float, float]]] = {
    x: [] for x in HOST_OPERATIONS
  }
  measured = None
  for num_threads in (*counts, cores):
    with Pool(num_threads) as pool:
      if measured is None:
        measured = _operations(effort.host_elems, pool)
      for name, seconds in _time(measured, pool, effort.host_rounds).items():
        rate = measured[name].num_bytes / seconds
        points[name].append((float(num_threads), rate))
  rates = {name: Curve(tuple(of_name)) for name, of_name in points.items()}
  best = max(rate for of_name in points.values() for _, rate in of_name)
  return HostRates(rates, best, cores)


def _time(
  measured: dict[str, _Measured], pool: Pool, num_rounds: int
) -> dict[str, float]:
  """Returns the median seconds of each operation; the first round is none."""
  seconds: dict[str, list[float]] = {name: [] for name in measured}
  for number in range(-1, num_rounds):
    for name, one in measured.items():
      if one.before is not None:
        pool.submit(one.before).wait()
      start_s = time.perf_counter()
      pool.submit(one.operation).wait()
      if number >= 0:
        seconds[name].append(time.perf_counter() - start_s)
      if one.after is not None:
        pool.submit(one.after).wait()
  return {name: statistics.median(s) for name, s in seconds.items()}


def _operations(num_elems: int, pool: Pool) -> dict[str, _Measured]:
  """Allocates state as a bucket has it, and returns what is run on it."""
  half = np.dtype(ml_dtypes.bfloat16)
  float_arrays, half_arrays = 7, 2
  sizes = [4 * num_elems] * float_arrays + [2 * num_elems] * half_arrays
  arena = Arena(Arena.bytes_for(sizes), pool=pool)
  p, mu, nu, *spare, total = (
    arena.empty(num_elems, np.float32) for _ in range(float_arrays)
  )
  grad, weight = (arena.empty(num_elems, half) for _ in range(half_arrays))
  rng = np.random.default_rng(0)
  p[:] = rng.standard_normal(num_elems, np.float32)
  grad[:] = (1e-3 * rng.standard_normal(num_elems, np.float32)).astype(half)
  segment = Segment(p, mu, nu, grad, weight)
  step = AdamwStep([segment], _SCALARS, 1.0)
  for _ in range(3):  # moments as training has them: zeros escape the codes
    pool.submit(step).wait()
  copies = [*map(AccumulateSegment, spare, (p, mu, nu))]
  sums = [AccumulateSegment(total, grad)]
  num_bytes = 24 * num_elems + grad.nbytes + weight.nbytes
  record2, record3 = (_record(num_elems, n, pool) for n in (2, 3))
  return {
    "step": _Measured(step, num_bytes),
    "record2": _recording(segment, record2, num_bytes),
    "record3": _recording(segment, record3, num_bytes),
    "copy": _Measured(Widen(copies), 24 * num_elems),
    **_taking_back(segment, record3, num_bytes),
    "accumulate": _Measured(Accumulate(sums), 10 * num_elems),
    "widen": _Measured(Widen(sums), 6 * num_elems),
    "narrow": _Measured(Narrow([NarrowSegment(p, weight)]), 6 * num_elems),
  }


def _record(num_elems: int, bytes_per_param: int, pool: Pool) -> Record:
  """Makes a record, its codes in an arena and with room for any escapes."""
  codes = codes_bytes([num_elems], bytes_per_param)
  sizes = [8 * num_offsets([num_elems]), codes]  # as they are asked for
  return new_record(
    [num_elems],
    bytes_per_param=bytes_per_param,
    escape_bytes_per_param=12.0,
    empty=Arena(Arena.bytes_for(sizes), pool=pool).empty,
    empty_escapes=np.empty,  # takes up RAM as far as it is used: hardly
  )


def _recording(segment: Segment, record: Record, step_bytes: int) -> _Measured:
  return _Measured(
    RecordStep([segment], _SCALARS, 1.0, record),
    step_bytes + record.codes.nbytes,
    after=Finish([segment], record),
  )


def _taking_back(
  segment: Segment, record: Record, step_bytes: int
) -> dict[str, _Measured]:
  """Returns undo and redo of a record."""
  assert segment.weight_out is not None
  without_weight = dataclasses.replace(segment, weight_out=None)
  codes = record.codes.nbytes
  return {
    "undo": _Measured(
      Undo([without_weight], record),
      step_bytes - segment.weight_out.nbytes + codes,
      before=RecordStep([segment], _SCALARS, 1.0, record),
    ),
    "redo": _Measured(
      Redo([segment], record, 1.0),
      step_bytes + codes,
      before=RecordStep([segment], _SCALARS, _BEFORE_REDO_SCALE, record),
    ),
  }
