"""The Python face of the hand-vectorised kernels of the host CPU."""

import dataclasses
import operator
import os
from collections.abc import Sequence

import numpy as np

from sojax import _cpu_ops
from sojax.plan.adamw import AdamScalars

CHUNK_ELEMS: int = _cpu_ops.CHUNK_ELEMS
"""Elements of a segment that share one sum of squares."""

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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Segment:
  """The arrays of one flat run of parameters, all of the same length.

  Each is one-dimensional and contiguous, and may start at any byte. Those
  that are written must not overlap any other. The segment does not own them.

  Attributes:
    p_inout: master weights, float32.
    mu_inout: first moments, float32.
    nu_inout: second moments, float32.
    grad: gradients, float32, float16 or ml_dtypes.bfloat16.
    weight_out: None, or where the new weights are also written: float32,
      bfloat16 (nearest to the master, ties away from zero; NaN is 0x7fc0) or
      float16 (nearest, ties to even; past the largest infinite; NaN is 0x7e00).
  """

  p_inout: np.ndarray
  mu_inout: np.ndarray
  nu_inout: np.ndarray
  grad: np.ndarray
  weight_out: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AccumulateSegment:
  """The arrays of one flat run of gradients that are added up.

  Each is one-dimensional and contiguous, and may start at any byte. Those
  that are written must not overlap any other. The segment does not own them.

  Attributes:
    sum_inout: the sums, float32 [n].
    grad: what is added, float32, float16 or ml_dtypes.bfloat16 [n].
    sumsq_out: None, or where the sums of squares of the new sums are written,
      float64 [ceil(n / CHUNK_ELEMS)]: one for each CHUNK_ELEMS elements,
      counted from the start of the segment; the last chunk may be short.
  """

  sum_inout: np.ndarray
  grad: np.ndarray
  sumsq_out: np.ndarray | None = None


class Pool:
  """Persistent threads that run the kernels, without the GIL.

  Several pools can work at the same time. One pool does one call at a time:
  those from several threads take turns.

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

  def adamw_step(
    self,
    segments: Sequence[Segment],
    scalars: AdamScalars,
    grad_scale: float,
  ) -> None:
    """Updates all the segments in one pass; returns when it is done.

    The bits of the result do not depend on the threads, the instruction set,
    the alignment, or on how parameters are divided into segments.

    Args:
      segments: the parameters. Segments of length zero are fine.
      scalars: the scalars of this step (see `sojax.plan.adamw`).
      grad_scale: multiplies every gradient first; rounded to float32.

    Raises:
      TypeError: if a field of a segment is not a NumPy array.
      ValueError: if an array has a wrong dtype, shape or length, is strided,
        read-only where it is written, or overlaps one that is written; or if
        the pool is closed. Nothing is changed then.
    """
    params = _cpu_ops.AdamParams(
      **dataclasses.asdict(scalars), grad_scale=float(grad_scale)
    )
    self._pool.adamw_step(
      [
        (x.p_inout, x.mu_inout, x.nu_inout, x.grad, x.weight_out)
        for x in segments
      ],
      params,
    )

  def widen(self, segments: Sequence[AccumulateSegment]) -> None:
    """Sets each sum to its gradient, exactly; returns when it is done.

    This starts a sum: whatever `sum_inout` held is overwritten.

    Args:
      segments: the gradients. Segments of length zero are fine.

    Raises:
      TypeError: as in `accumulate`.
      ValueError: as in `accumulate`.
    """
    self._pool.widen(_accumulate_fields(segments))

  def accumulate(self, segments: Sequence[AccumulateSegment]) -> None:
    """Adds each gradient to its sum, in float32; returns when it is done.

    The bits of the sums and of their squares do not depend on the threads, the
    instruction set or the alignment; nor on how gradients are divided into
    segments, if a segment with `sumsq_out` starts at a multiple of CHUNK_ELEMS.
    A sum that is not finite makes the sum of squares of its chunk not finite.

    Args:
      segments: the sums and gradients. Segments of length zero are fine.

    Raises:
      TypeError: if a field of a segment is not a NumPy array.
      ValueError: if an array has a wrong dtype, shape or length, is strided,
        read-only where it is written, or overlaps one that is written; or if
        the pool is closed. Nothing is changed then.
    """
    self._pool.accumulate(_accumulate_fields(segments))

  def close(self) -> None:
    """Ends the threads, after the call in progress; may be called again."""
    self._pool.close()

  def __enter__(self) -> "Pool":
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()


def _accumulate_fields(segments: Sequence[AccumulateSegment]):
  return [(x.sum_inout, x.grad, x.sumsq_out) for x in segments]


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
