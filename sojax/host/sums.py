"""Sums of gradients over the micro-batches of a step, on the host."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sojax.host.arena import Arena
from sojax.host.kernels import AccumulateSegment, Pool
from sojax.plan.buckets import CHUNK_ELEMS, Bucket, Layout


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
  """A part of a parameter that lies in one shard of one unit.

  Attributes:
    leaf: index of the parameter.
    start: its first element there.
    unit: number of the unit in its bucket.
    shard: number of the shard.
    offset: its first element in the shard.
    size: number of elements.
  """

  leaf: int
  start: int
  unit: int
  shard: int
  offset: int
  size: int

  @property
  def num_chunks(self) -> int:
    return math.ceil(self.size / CHUNK_ELEMS)


class GradientSums:
  """Float32 sums of the host buckets' gradients, and their squares.

  They are scratch: a step's first micro-batch overwrites what the step before
  left, failed or not.
  """

  def __init__(
    self, layout: Layout, make_arena: Callable[[int], Arena] = Arena
  ):
    """Allocates the sums.

    Args:
      layout: the model cut into buckets. Those that are trained on the host are
        added up here.
      make_arena: makes the arena that they lie in, of so many bytes.
    """
    buckets = layout.updated_by_host
    self._num_shards = layout.num_shards
    self._pieces = {
      bucket.index: list(_pieces(bucket, layout.num_shards))
      for bucket in buckets
    }
    # In leaf order, however the leaves are cut: on one device pieces begin with
    # a chunk of their leaf, and the squares are summed in one order.
    self._first_chunk: dict[_Piece, int] = {}
    num_chunks = 0
    every = [piece for pieces in self._pieces.values() for piece in pieces]
    for piece in sorted(every, key=lambda piece: (piece.leaf, piece.start)):
      self._first_chunk[piece] = num_chunks
      num_chunks += piece.num_chunks
    arena = make_arena(
      Arena.bytes_for([8 * num_chunks, *(4 * b.size for b in buckets)])
    )
    self._sumsq = arena.empty(num_chunks, np.float64)
    self._sums = {
      bucket.index: arena.empty(bucket.size, np.float32) for bucket in buckets
    }

  def units(self, bucket: Bucket) -> list[list[np.ndarray]]:
    """Returns the sums: flat views, one for each shard of each wire unit."""
    bounds = np.cumsum([unit.size for unit in bucket.units])[:-1]
    units = np.split(self._sums[bucket.index], bounds)
    return [np.split(unit, self._num_shards) for unit in units]

  def add(
    self,
    pool: Pool,
    bucket: Bucket,
    grads: Sequence[Sequence[np.ndarray]],
    *,
    first: bool,
    last: bool,
  ) -> None:
    """Adds the gradients of a micro-batch; blocks without the GIL.

    Args:
      pool: runs the kernel.
      bucket: what they are the gradients of.
      grads: the shards of each wire unit's gradient: flat, float32, bfloat16 or
        float16.
      first: whether they begin new sums.
      last: whether the sums are complete, so that their squares are summed.
    """
    kernel = pool.widen if first else pool.accumulate
    sums = self.units(bucket)
    segments = []
    for piece in self._pieces[bucket.index]:
      part = slice(piece.offset, piece.offset + piece.size)
      first_chunk = self._first_chunk[piece]
      chunks = slice(first_chunk, first_chunk + piece.num_chunks)
      segments.append(
        AccumulateSegment(
          sums[piece.unit][piece.shard][part],
          grads[piece.unit][piece.shard][part],
          self._sumsq[chunks] if last else None,
        )
      )
    kernel(segments)

  def squares(self, bucket: Bucket) -> np.float64:
    """Returns the sum of the squares of one bucket's complete sums."""
    with np.errstate(over="ignore", invalid="ignore"):
      return np.float64(
        sum(
          self._sumsq[first : first + piece.num_chunks].sum()
          for piece in self._pieces[bucket.index]
          for first in (self._first_chunk[piece],)
        )
      )

  def sum_of_squares(self) -> np.float32:
    """Returns the sum of the squares of all sums: one float64 sum, rounded.

    It is infinite past float32's range, and not finite if a sum is not.
    """
    with np.errstate(over="ignore", invalid="ignore"):
      return np.float32(np.sum(self._sumsq))


def _pieces(bucket: Bucket, num_shards: int) -> Iterator[_Piece]:
  """Yields the parts of slices between the bounds of shards."""
  for number, unit in enumerate(bucket.units):
    shard_elems = unit.size // num_shards
    position = 0
    for piece in unit.slices:
      start, end = piece.start, position + piece.size
      while position < end:
        shard, offset = divmod(position, shard_elems)
        size = min(end - position, shard_elems - offset)
        yield _Piece(piece.leaf, start, number, shard, offset, size)
        start, position = start + size, position + size
