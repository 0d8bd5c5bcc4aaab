"""What a pool of kernels can be asked to do."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sojax import _cpu_ops
from sojax.host.record import Record, Taken, check_bytes_per_param
from sojax.host.segments import (
  AccumulateSegment,
  NarrowSegment,
  NormSegment,
  Segment,
)
from sojax.plan.adamw import AdamScalars

_SCALARS = [field.name for field in dataclasses.fields(AdamScalars)]


class Operation(Protocol):
  """One pass over a list of segments."""

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the operation into the pool's queue."""
    ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdamwStep:
  """Takes an AdamW step.

  The bits of the result do not depend on the threads, the instruction set,
  the alignment, or on how parameters are divided into segments (sums of
  squares: if a segment starts at a multiple of CHUNK_ELEMS).

  Attributes:
    segments: the parameters.
    scalars: the scalars of this step (see `sojax.plan.adamw`).
    grad_scale: multiplies every gradient first; rounded to float32.
  """

  segments: Sequence[Segment]
  scalars: AdamScalars
  grad_scale: float

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the step into the queue."""
    return pool.adamw_step(
      _fields(self.segments), _params(self.scalars, self.grad_scale)
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RecordStep:
  """Takes an AdamW step and records how to take it back.

  The state becomes that of an AdamwStep, except in chunks that were left out
  because the record is full: these stay as they are, and what is in their
  `weight_out` is not specified. Sums of squares are written for all chunks.

  The gradients, and their sums, must stay unchanged until a Finish, Undo or
  Redo has ended.

  Attributes:
    segments: the parameters.
    scalars: the scalars of this step.
    grad_scale: multiplies every gradient first; rounded to float32.
    record: a record of these lengths that holds no step. It does afterwards.
  """

  segments: Sequence[Segment]
  scalars: AdamScalars
  grad_scale: float
  record: Record

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the step into the queue."""
    if self.record.taken is not None:
      raise ValueError(
        "the record holds a step already; submit a Finish, Undo or Redo of it"
        " first"
      )
    submitted = pool.record(
      _fields(self.segments),
      _params(self.scalars, self.grad_scale),
      _record_fields(self.record),
    )
    self.record.taken = Taken(
      _lengths(self.segments), self.scalars, self.grad_scale
    )
    return submitted


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Finish:
  """Commits a recorded step: takes it where chunks were left out.

  Attributes:
    segments: those of the RecordStep, with the same gradients.
    record: the record of the step. It holds none afterwards.
  """

  segments: Sequence[Segment]
  record: Record

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the operation into the queue."""
    taken = _taken(self.record, self.segments)
    submitted = pool.finish(
      _fields(self.segments),
      _params(taken.scalars, taken.grad_scale),
      _record_fields(self.record),
    )
    self.record.taken = None
    return submitted


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Undo:
  """Takes a recorded step back: every bit is as it was before.

  Masters and moments, that is: `weight_out` is not written, and a Narrow can
  follow. Split masters are their own weights.

  Attributes:
    segments: those of the RecordStep, with the same gradients.
    record: the record of the step. It holds none afterwards.
  """

  segments: Sequence[Segment]
  record: Record

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the operation into the queue."""
    taken = _taken(self.record, self.segments)
    submitted = pool.undo(
      _fields(self.segments),
      _params(taken.scalars, taken.grad_scale),
      _record_fields(self.record),
    )
    self.record.taken = None
    return submitted


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Redo:
  """Takes a recorded step back and again with another grad_scale, in one pass.

  The state and `weight_out` become those of an AdamwStep from the state before
  the recorded step, chunks that were left out included.

  Attributes:
    segments: those of the RecordStep, with the same gradients.
    record: the record of the step. It holds none afterwards.
    grad_scale: the new one, for the gradients as they are.
  """

  segments: Sequence[Segment]
  record: Record
  grad_scale: float

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the operation into the queue."""
    taken = _taken(self.record, self.segments)
    submitted = pool.redo(
      _fields(self.segments),
      _params(taken.scalars, taken.grad_scale),
      float(self.grad_scale),
      _record_fields(self.record),
    )
    self.record.taken = None
    return submitted


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Widen:
  """Sets each sum to its gradient, exactly.

  This starts a sum: whatever `sum_inout` held is overwritten.

  Attributes:
    segments: the sums and gradients.
  """

  segments: Sequence[AccumulateSegment]

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the operation into the queue."""
    return pool.widen(_fields(self.segments))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Accumulate:
  """Adds each gradient to its sum, in float32.

  The bits of the sums and of their squares do not depend on the threads, the
  instruction set or the alignment; nor on how gradients are divided into
  segments, if a segment with `sumsq_out` starts at a multiple of CHUNK_ELEMS.

  Attributes:
    segments: the sums and gradients.
  """

  segments: Sequence[AccumulateSegment]

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the operation into the queue."""
    return pool.accumulate(_fields(self.segments))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Norm:
  """Adds up the squares of gradients and changes nothing else.

  Attributes:
    segments: the gradients, and where the sums of squares go. Their bits are
      those that an Accumulate or a step writes.
  """

  segments: Sequence[NormSegment]

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the operation into the queue."""
    return pool.squares(_fields(self.segments))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Narrow:
  """Writes working weights from masters, rounded as a step rounds them.

  Attributes:
    segments: the masters and weights.
  """

  segments: Sequence[NarrowSegment]

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the operation into the queue."""
    return pool.narrow(_fields(self.segments))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Zero:
  """Sets every byte of some arrays to zero.

  Pages that were never written come into RAM by that: near the cores of the
  pool's threads, if the memory is not bound to a NUMA node.

  Attributes:
    arrays_out: one-dimensional contiguous arrays of any type of numbers. Errors
      name the i-th `segments[i].array_out`.
  """

  arrays_out: Sequence[np.ndarray]

  def submit_to(self, pool: _cpu_ops.Pool) -> _cpu_ops.Submitted:
    """Checks all arguments and puts the operation into the queue."""
    return pool.zero([(array,) for array in self.arrays_out])


def _fields(segments):
  return [segment.fields() for segment in segments]


def _params(scalars: AdamScalars, grad_scale: float) -> _cpu_ops.AdamParams:
  values = {name: getattr(scalars, name) for name in _SCALARS}
  return _cpu_ops.AdamParams(**values, grad_scale=float(grad_scale))


def _record_fields(record: Record):
  check_bytes_per_param(record.bytes_per_param)
  return record.bytes_per_param, record.codes, record.escapes, record.offsets


def _lengths(segments: Sequence[Segment]) -> tuple[int, ...]:
  return tuple(len(segment.p_inout) for segment in segments)


def _taken(record: Record, segments: Sequence[Segment]) -> Taken:
  """Returns the step that a record holds of these segments."""
  if record.taken is None:
    raise ValueError("the record holds no step; submit a RecordStep first")
  lengths = _lengths(segments)
  if lengths != record.taken.lengths:
    raise ValueError(
      f"the segments have {lengths} elements but the record holds a step of"
      f" segments of {record.taken.lengths}; give the segments of that step"
    )
  return record.taken
