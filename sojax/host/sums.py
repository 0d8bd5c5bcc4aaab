"""Sums of gradients over the micro-batches of a step, on the host."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sojax.host.arena import Arena
from sojax.host.kernels import AccumulateSegment, Pool
from sojax.plan.buckets import CHUNK_ELEMS, Bucket, Layout, Leaf


class GradientSums:
  """Float32 sums of the host buckets' gradients, and their squares.

  They are scratch: a step's first micro-batch overwrites what the step before
  left, failed or not.
  """

  def __init__(self, layout: Layout):
    """Allocates the sums.

    Args:
      layout: the model cut into buckets. Those that are trained on the host are
        added up here.
    """
    buckets = [b for b in layout.buckets if b.trained and not b.on_device]
    leaves = layout.model.leaves
    num_chunks = [_num_chunks(leaf) for leaf in leaves]
    arena = Arena(
      Arena.bytes_for([8 * sum(num_chunks), *(4 * b.size for b in buckets)])
    )
    self._first_chunk = list(itertools.accumulate(num_chunks, initial=0))
    # In leaf order, however the leaves are cut. Chunks of what is not added up
    # here stay 0.
    self._sumsq = arena.empty(sum(num_chunks), np.float64)
    self._sumsq.fill(0.0)
    self._sums = {
      bucket.index: arena.empty(bucket.size, np.float32) for bucket in buckets
    }
    for sums in self._sums.values():
      sums.fill(0.0)

  def units(self, bucket: Bucket) -> list[np.ndarray]:
    """Returns the sums: one flat view per wire unit of the bucket."""
    bounds = np.cumsum([unit.size for unit in bucket.units])[:-1]
    return np.split(self._sums[bucket.index], bounds)

  def add(
    self,
    pool: Pool,
    bucket: Bucket,
    grads: Sequence[np.ndarray],
    *,
    first: bool,
    last: bool,
  ) -> None:
    """Adds the gradients of a micro-batch; blocks without the GIL.

    Args:
      pool: runs the kernel.
      bucket: what they are the gradients of.
      grads: gradients of each wire unit, float32, bfloat16 or float16, any
        shape.
      first: whether they begin new sums.
      last: whether the sums are complete, so that their squares are summed.
    """
    kernel = pool.widen if first else pool.accumulate
    kernel([*self._segments(bucket, grads, with_squares=last)])

  def sum_of_squares(self) -> np.float32:
    """Returns the sum of the squares of all sums: one float64 sum, rounded.

    It is infinite past float32's range, and not finite if a sum is not.
    """
    with np.errstate(over="ignore", invalid="ignore"):
      return np.float32(np.sum(self._sumsq))

  def _segments(
    self, bucket: Bucket, grads: Iterable[np.ndarray], *, with_squares: bool
  ) -> Iterator[AccumulateSegment]:
    """Returns one segment per slice, which begins with a chunk of its leaf."""
    sums = self.units(bucket)
    for unit, total, grad in zip(bucket.units, sums, grads, strict=True):
      flat, offset = grad.reshape(-1), 0
      for piece in unit.slices:
        part = slice(offset, offset + piece.size)
        first = self._first_chunk[piece.leaf] + piece.start // CHUNK_ELEMS
        chunks = slice(first, first + math.ceil(piece.size / CHUNK_ELEMS))
        yield AccumulateSegment(
          total[part],
          flat[part],
          self._sumsq[chunks] if with_squares else None,
        )
        offset += piece.size


def _num_chunks(leaf: Leaf) -> int:
  return math.ceil(leaf.size / CHUNK_ELEMS) if leaf.trained else 0
