"""The threads that run the hand-vectorised kernels of the host CPU."""

import dataclasses
import operator
import os
from collections.abc import Sequence

import numpy as np

from sojax import _cpu_ops
from sojax.host.operations import (
  Accumulate,
  AdamwStep,
  Operation,
  Widen,
  Zero,
)
from sojax.host.segments import AccumulateSegment, Segment
from sojax.plan.adamw import AdamScalars
from sojax.plan.buckets import CHUNK_ELEMS

# Buckets are cut between the chunks of which the kernels sum the squares.
assert CHUNK_ELEMS == _cpu_ops.CHUNK_ELEMS

# More would be a mistake in the argument: no machine has use for them.
_MAX_THREADS = 1024


@dataclasses.dataclass(frozen=True)
class CpuInfo:
  """What the kernels found on this machine.

  Attributes:
    isas: the instruction sets that can be asked for, best first: out of
      "avx512", "avx2", "sve", "neon" and "scalar".
    isa: the one that is taken when none is asked for.
    vector_bits: the size of its registers; of "sve" another on each CPU.
    cores: number of cores that this process may run on.
  """

  isas: tuple[str, ...]
  isa: str
  vector_bits: int
  cores: int


def cpu_info() -> CpuInfo:
  """Reports the instruction sets and cores that the kernels can use.

  >>> cpu_info().isas[-1]
  'scalar'
  """
  isas, vector_bits = zip(*_cpu_ops.available_isas(), strict=True)
  return CpuInfo(
    isas=isas,
    isa=isas[0],
    vector_bits=vector_bits[0],
    cores=len(os.sched_getaffinity(0)),
  )


class Completion:
  """A submitted operation, to be waited for.

  It may be dropped: the operation is done all the same. Its arrays are let go
  when somebody has waited for it, else when the pool is next used after its
  end.
  """

  def __init__(self, submitted: _cpu_ops.Submitted):
    self._submitted = submitted

  def done(self) -> bool:
    """Returns whether the operation has ended, also by failing."""
    return self._submitted.done()

  def wait(self) -> None:
    """Returns when the operation has ended; sleeps without the GIL.

    Any thread may wait, also several, and after the pool was closed.

    Raises:
      RuntimeError: if it failed, or was submitted before a fork.
      MemoryError: if it failed for want of memory.
    """
    self._submitted.wait()


class Pool:
  """Persistent threads that run the kernels, without the GIL.

  Operations (`sojax.host.operations`) are started in the order of their
  submission. Threads that find no more to do in one go on to the next, unless
  it writes an array that an earlier one reads or writes, or reads one that
  an earlier one writes: then it starts when that one has ended. So the result
  is that of one operation after the other. Several pools can work at the same
  time, and know nothing of each other.

  Attributes:
    num_threads: number of threads.
    isa: the instruction set in use, one of `cpu_info().isas`.
    cores: the core of each thread, or None if they are not bound.

  >>> with Pool(2, isa="scalar") as pool:
  ...   pool.isa
  'scalar'
  """

  def __init__(
    self,
    num_threads: int,
    *,
    isa: str = "auto",
    cores: Sequence[int] | None = None,
  ):
    """Starts the threads.

    Args:
      num_threads: number of threads, in [1, 1024].
      isa: one of `cpu_info().isas`, or "auto" for the best.
      cores: binds each thread to a core of its own: `num_threads` different
        ones out of os.sched_getaffinity(0). None leaves them to the operating
        system.

    Raises:
      ValueError: if an argument is out of its range, or the machine does not
        have the instruction set.
    """
    self.num_threads = operator.index(num_threads)
    if not 1 <= self.num_threads <= _MAX_THREADS:
      raise ValueError(
        f"num_threads={num_threads} must lie in [1, {_MAX_THREADS}]"
      )
    info = cpu_info()
    self.isa = info.isa if isa == "auto" else isa
    if self.isa not in info.isas:
      raise ValueError(
        f"isa={isa!r} is not available on this machine; choose 'auto' or one"
        f" of {info.isas}"
      )
    self.cores = None if cores is None else tuple(map(operator.index, cores))
    if self.cores is not None:
      _check_cores(self.cores, self.num_threads)
    self._pool = _cpu_ops.Pool(self.num_threads, self.isa, self.cores or ())

  def bind_to_cores(self, cores: Sequence[int]) -> None:
    """Binds the threads to other cores, at once.

    Args:
      cores: as the constructor takes them.

    Raises:
      ValueError: as the constructor does, or if the pool is closed.
    """
    cores = tuple(map(operator.index, cores))
    _check_cores(cores, self.num_threads)
    self._pool.bind_to_cores(cores)
    self.cores = cores

  def submit(self, operation: Operation) -> Completion:
    """Puts an operation into the queue, and does not wait for it.

    Its arrays must not be touched until it has ended; reading those that it
    only reads is fine. They are kept alive until then.

    Args:
      operation: one of `sojax.host.operations`.

    Returns:
      What can be waited for.

    Raises:
      TypeError: if a field of a segment is not a NumPy array.
      ValueError: if an array has a wrong dtype, shape or length, is strided,
        read-only where it is written, or overlaps one that is written; if a
        record does not fit to the operation; or if the pool is closed. Nothing
        is changed then.
    """
    return Completion(operation.submit_to(self._pool))

  def adamw_step(
    self,
    segments: Sequence[Segment],
    scalars: AdamScalars,
    grad_scale: float,
  ) -> None:
    """Submits an `AdamwStep` and waits for it.

    Args:
      segments: the parameters.
      scalars: the scalars of this step (see `sojax.plan.adamw`).
      grad_scale: multiplies every gradient first; rounded to float32.

    Raises:
      TypeError: as in `submit`.
      ValueError: as in `submit`.
    """
    self.submit(AdamwStep(segments, scalars, grad_scale)).wait()

  def widen(self, segments: Sequence[AccumulateSegment]) -> None:
    """Submits a `Widen` and waits for it.

    Args:
      segments: the sums and gradients.

    Raises:
      TypeError: as in `submit`.
      ValueError: as in `submit`.
    """
    self.submit(Widen(segments)).wait()

  def accumulate(self, segments: Sequence[AccumulateSegment]) -> None:
    """Submits an `Accumulate` and waits for it.

    Args:
      segments: the sums and gradients.

    Raises:
      TypeError: as in `submit`.
      ValueError: as in `submit`.
    """
    self.submit(Accumulate(segments)).wait()

  def zero(self, arrays_out: Sequence[np.ndarray]) -> None:
    """Submits a `Zero` and waits for it.

    Args:
      arrays_out: one-dimensional contiguous arrays of any type of numbers.

    Raises:
      TypeError: as in `submit`.
      ValueError: as in `submit`.
    """
    self.submit(Zero(arrays_out)).wait()

  def close(self) -> None:
    """Ends the threads, after all that was submitted; may be called again."""
    self._pool.close()

  def __enter__(self) -> "Pool":
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()


def _check_cores(cores: tuple[int, ...], num_threads: int) -> None:
  if len(cores) != num_threads:
    raise ValueError(
      f"cores={cores} names {len(cores)} cores for {num_threads} threads; name"
      " one for each"
    )
  if len(set(cores)) != len(cores):
    raise ValueError(f"cores={cores} must be different from each other")
  allowed = os.sched_getaffinity(0)
  if not allowed.issuperset(cores):
    raise ValueError(
      f"cores={cores} must be among those of this process: {sorted(allowed)}"
    )
