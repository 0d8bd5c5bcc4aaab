"""Host buckets whose step can be taken back, every bit of it."""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from sojax.host.adam import HostBucket, arena_bytes
from sojax.host.arena import Arena
from sojax.host.casts import SeparatelyCastBucket, make_wide_gradients
from sojax.host.kernels import Pool
from sojax.host.masters import FloatMasters, Masters, Shards, SplitMasters
from sojax.host.operations import (
  AdamwStep,
  Finish,
  RecordStep,
  Redo,
  Undo,
  Widen,
)
from sojax.host.record import Record, new_record
from sojax.host.segments import AccumulateSegment, Segment
from sojax.plan.adamw import AdamScalars
from sojax.plan.buckets import CHUNK_ELEMS, Bucket, Layout
from sojax.plan.casts import SeparateCasts
from sojax.plan.plan import Plan
from sojax.plan.records import (
  BYTES_PER_PARAM,
  record_bytes,
  segment_lengths,
  speculating_buckets,
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Taken:
  """A step that is not settled yet; its gradients are parked here."""

  grads: Shards
  scalars: AdamScalars
  grad_scale: float


class SpeculativeBucket(HostBucket, abc.ABC):
  """A host bucket that can take a step before it is known to count.

  Each `speculate` is followed by one `commit`, `undo` or `redo`.
  """

  def __init__(self, bucket: Bucket, arena: Arena, masters: Masters):
    super().__init__(bucket, arena, masters)
    self._taken: _Taken | None = None

  @property
  def pending(self) -> bool:
    """Whether there is a step that is neither committed nor taken back."""
    return self._taken is not None

  def speculate(
    self,
    pool: Pool,
    grads: Shards,
    weights_out: Shards,
    scalars: AdamScalars,
    grad_scale: float,
    *,
    sum_squares: bool = False,
  ) -> np.float64 | None:
    """Takes a step that can be taken back.

    Blocks without the GIL, as all methods here do.

    Args:
      pool: as for `step`.
      grads: likewise; they must stay unchanged until the step is settled.
      weights_out: as for `step`.
      scalars: likewise.
      grad_scale: likewise.
      sum_squares: whether to sum the squares of the gradients as well.

    Returns:
      The sum of the squares, if it is asked for.
    """
    assert self._taken is None
    self._taken = _Taken(grads, scalars, grad_scale)
    segments = self.segments(grads, weights_out)
    if not sum_squares:
      self._take(pool, segments)
      return None
    sums = [_new_sumsq(segment.grad) for segment in segments]
    self._take(
      pool,
      [
        dataclasses.replace(segment, sumsq_out=out)
        for segment, out in zip(segments, sums, strict=True)
      ],
    )
    with np.errstate(over="ignore", invalid="ignore"):
      return np.float64(sum(out.sum() for out in sums))

  def commit(self, pool: Pool) -> bool:
    """Makes the step count.

    Returns:
      Whether `weights_out` had all new weights; if not, they have to be written
      again (`Masters.round_to`).
    """
    complete = self._commit(pool)
    self._taken = None
    return complete

  def undo(self, pool: Pool) -> None:
    """Takes the step back; what `weights_out` was is left as it is."""
    self._undo(pool)
    self._taken = None

  def redo(self, pool: Pool, weights_out: Shards, grad_scale: float) -> None:
    """Takes the step back, and again with another grad_scale."""
    self._redo(pool, weights_out, grad_scale)
    self._taken = None

  def forget(self) -> None:
    """Drops what could take a step back; the state is about to be replaced."""
    self._taken = None

  def _pending(self) -> _Taken:
    assert self._taken is not None
    return self._taken

  @abc.abstractmethod
  def used_bytes(self) -> int:
    """Returns the bytes that the pending step needs to be taken back."""

  @abc.abstractmethod
  def num_escapes(self) -> int:
    """Returns how many values of the pending step no code could express."""

  @abc.abstractmethod
  def _take(self, pool: Pool, segments: list[Segment]) -> None: ...

  @abc.abstractmethod
  def _commit(self, pool: Pool) -> bool: ...

  @abc.abstractmethod
  def _undo(self, pool: Pool) -> None: ...

  @abc.abstractmethod
  def _redo(
    self, pool: Pool, weights_out: Shards, grad_scale: float
  ) -> None: ...


class RecordingBucket(SpeculativeBucket):
  """Keeps a record of how far the inverse of a step is off."""

  def __init__(
    self, bucket: Bucket, arena: Arena, masters: Masters, record: Record
  ):
    super().__init__(bucket, arena, masters)
    self._record = record

  def forget(self) -> None:
    """Drops what could take a step back; the state is about to be replaced."""
    super().forget()
    self._record.taken = None

  def used_bytes(self) -> int:
    """Returns the bytes of codes, offsets and escapes."""
    record = self._record
    return record.codes.nbytes + record.offsets.nbytes + 4 * self.num_escapes()

  def num_escapes(self) -> int:
    """Returns how many values of the pending step no code could express."""
    return self._record.num_escapes()

  def _take(self, pool: Pool, segments: list[Segment]) -> None:
    taken = self._pending()
    step = RecordStep(segments, taken.scalars, taken.grad_scale, self._record)
    pool.submit(step).wait()

  def _commit(self, pool: Pool) -> bool:
    if not self._record.num_left_out():
      self._record.taken = None
      return True
    pool.submit(Finish(self._segments_taken(), self._record)).wait()
    return False

  def _undo(self, pool: Pool) -> None:
    pool.submit(Undo(self._segments_taken(), self._record)).wait()

  def _redo(self, pool: Pool, weights_out: Shards, grad_scale: float) -> None:
    segments = self.segments(self._pending().grads, weights_out)
    pool.submit(Redo(segments, self._record, grad_scale)).wait()

  def _segments_taken(self) -> list[Segment]:
    return self.segments(self._pending().grads, None)


class PingPongBucket(SpeculativeBucket):
  """Keeps the state before a step: a second set of arrays takes its turn."""

  def __init__(
    self,
    bucket: Bucket,
    arena: Arena,
    masters: FloatMasters,
    spare: HostBucket,
  ):
    super().__init__(bucket, arena, masters)
    self._spare = spare

  def used_bytes(self) -> int:
    """Returns the bytes of the second set."""
    return sum(array.nbytes for array in _arrays(self._spare))

  def num_escapes(self) -> int:
    """Returns 0: there are no codes."""
    return 0

  def _take(self, pool: Pool, segments: list[Segment]) -> None:
    taken = self._pending()
    # A sum that begins is a copy of its first term, made by all threads.
    copies = map(AccumulateSegment, _arrays(self._spare), _arrays(self))
    pool.submit(Widen([*copies])).wait()
    step = AdamwStep(segments, taken.scalars, taken.grad_scale)
    pool.submit(step).wait()

  def _commit(self, pool: Pool) -> bool:
    return True

  def _undo(self, pool: Pool) -> None:
    spare = self._spare
    self.masters, spare.masters = spare.masters, self.masters
    self.moments, spare.moments = spare.moments, self.moments
    shards = self._moment_shards, spare._moment_shards
    spare._moment_shards, self._moment_shards = shards

  def _redo(self, pool: Pool, weights_out: Shards, grad_scale: float) -> None:
    self._undo(pool)
    taken = self._pending()
    self.step(pool, taken.grads, weights_out, taken.scalars, grad_scale)


def _arrays(bucket: HostBucket) -> list[np.ndarray]:
  assert isinstance(bucket.masters, FloatMasters)
  return [bucket.masters.array, *bucket.moments.values()]


def _new_sumsq(grad: np.ndarray) -> np.ndarray:
  return np.empty(math.ceil(grad.size / CHUNK_ELEMS), np.float64)


def make_host_buckets(
  layout: Layout,
  plan: Plan,
  casts: SeparateCasts,
  make_arena: Callable[..., Arena],
  working_copy: Mapping[int, Shards] | None = None,
) -> dict[int, HostBucket]:
  """Allocates the state of the host buckets, and what takes steps back.

  Args:
    layout: the model cut into buckets.
    plan: how masters are stored, which buckets can take a step back, by what.
    casts: the casts that are no part of an update.
    make_arena: makes their arenas, as `Arena` does. With pool=None, that of
      escapes takes up RAM only as far as they are written: few, as a rule.
    working_copy: the working weights of every host bucket, which split masters
      are halves of.

  Returns:
    The buckets by their index, zero.
  """
  on_host = [bucket for bucket in layout.buckets if not bucket.on_device]
  split = plan.master == "split"
  state = make_arena(arena_bytes(on_host, master_bytes=2 if split else 4))
  records = _Records(layout, plan, make_arena)
  wide = make_wide_gradients(layout, casts, make_arena)

  def make(bucket: Bucket) -> HostBucket:
    if split:
      assert working_copy is not None
      masters = SplitMasters(bucket, state, working_copy[bucket.index])
    else:
      masters = FloatMasters(bucket, state, layout.num_shards)
    if bucket.trained and (casts.widen or casts.narrow):
      return SeparatelyCastBucket(bucket, state, masters, casts, wide)
    return records.make_bucket(bucket, state, masters)

  return {bucket.index: make(bucket) for bucket in on_host}


class _Records:
  """The memory of what takes steps back, given to the buckets."""

  def __init__(
    self, layout: Layout, plan: Plan, make_arena: Callable[..., Arena]
  ):
    self._plan = plan
    self._num_shards = layout.num_shards
    speculating = speculating_buckets(layout, plan)
    self._indices = {bucket.index for bucket in speculating}
    sizes = [
      record_bytes(bucket, plan, layout.num_shards) for bucket in speculating
    ]
    if sizes:
      self._dense = make_arena(
        Arena.bytes_for(n for x in sizes for n in x.dense)
      )
      self._escapes = make_arena(
        Arena.bytes_for(x.escapes for x in sizes), pool=None
      )

  def make_bucket(
    self, bucket: Bucket, arena: Arena, masters: Masters
  ) -> HostBucket:
    """Returns a bucket that can take a step back, if there is memory for it."""
    if bucket.index not in self._indices:
      return HostBucket(bucket, arena, masters)
    if self._plan.speculation == "pingpong":
      assert isinstance(masters, FloatMasters)
      second = FloatMasters(bucket, self._dense, self._num_shards)
      spare = HostBucket(bucket, self._dense, second)
      return PingPongBucket(bucket, arena, masters, spare)
    return RecordingBucket(bucket, arena, masters, self._new_record(bucket))

  def _new_record(self, bucket: Bucket) -> Record:
    return new_record(
      segment_lengths(bucket, self._num_shards),
      bytes_per_param=BYTES_PER_PARAM[self._plan.speculation],
      escape_bytes_per_param=self._plan.escape_bytes_per_param,
      empty=self._dense.empty,
      empty_escapes=self._escapes.empty,
    )
