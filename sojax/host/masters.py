"""Master weights of a host bucket: float32, or split into two halves."""

import abc
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from sojax.host.arena import Arena
from sojax.host.kernels import Pool
from sojax.host.operations import Narrow
from sojax.host.segments import NarrowSegment
from sojax.plan.buckets import Bucket

Shards = Sequence[Sequence[np.ndarray]]
"""The shards of each wire unit of a bucket."""


class OfSegment(NamedTuple):
  """Arrays of a `Segment`, by its fields."""

  p_inout: np.ndarray
  p_low_inout: np.ndarray | None
  weight_out: np.ndarray | None


class Masters(abc.ABC):
  """Master weights of one bucket, by wire unit.

  Attributes:
    num_shards: of each unit.
  """

  num_shards: int

  @abc.abstractmethod
  def read(self, unit: int, start: int, stop: int) -> np.ndarray:
    """Returns a range of a unit's masters, float32 [stop - start].

    It may be a view.
    """

  @abc.abstractmethod
  def write(self, unit: int, start: int, values: np.ndarray) -> None:
    """Replaces a range of a unit's masters, also where it is working weights.

    Args:
      unit: number of the unit.
      start: first element.
      values: float32 [n].
    """

  @abc.abstractmethod
  def of_segment(
    self, unit: int, shard: int, weights_out: Shards | None
  ) -> OfSegment:
    """Returns what a segment of a step has of masters and weights.

    Args:
      unit: number of the unit.
      shard: number of the shard.
      weights_out: where new weights go; None writes none. Split masters are
        the weights.
    """

  @abc.abstractmethod
  def round_to(self, weights_out: Shards, pool: Pool) -> None:
    """Writes working weights, rounded as a step rounds them.

    Args:
      weights_out: where they go. Split masters are the weights.
      pool: runs the kernel.
    """


class FloatMasters(Masters):
  """Float32 in the arena."""

  def __init__(self, bucket: Bucket, arena: Arena, num_shards: int):
    self.num_shards = num_shards
    self.array = arena.empty(bucket.size, np.float32)
    self._units = by_unit(self.array, bucket)
    self._shards = by_shard(self.array, bucket, num_shards)

  def read(self, unit: int, start: int, stop: int) -> np.ndarray:
    """Returns a view."""
    return self._units[unit][start:stop]

  def write(self, unit: int, start: int, values: np.ndarray) -> None:
    """Replaces a range; working weights are made from it elsewhere."""
    self._units[unit][start : start + values.size] = values

  def of_segment(
    self, unit: int, shard: int, weights_out: Shards | None
  ) -> OfSegment:
    """Returns what a segment of a step has of masters and weights."""
    out = None if weights_out is None else weights_out[unit][shard]
    return OfSegment(self._shards[unit][shard], None, out)

  def round_to(self, weights_out: Shards, pool: Pool) -> None:
    """Writes working weights, rounded as a step rounds them."""
    segments = [
      NarrowSegment(master, out)
      for masters, outs in zip(self._shards, weights_out, strict=True)
      for master, out in zip(masters, outs, strict=True)
    ]
    pool.submit(Narrow(segments)).wait()


class SplitMasters(Masters):
  """A bfloat16, which is the working weight, and the remainder in the arena.

  The bits of a float are (high << 16) + low. The bfloat16 is the nearest to it,
  ties away from zero. The idea is Split-SGD-BF16's (arXiv 2005.04680).
  """

  def __init__(self, bucket: Bucket, arena: Arena, high: Shards):
    """Allocates the remainders.

    Args:
      bucket: what they are the masters of.
      arena: has room for 2 bytes a parameter.
      high: bfloat16, the working weights.
    """
    self.num_shards = len(high[0])
    self._high = high
    low = arena.empty(bucket.size, np.int16)
    self._low = by_shard(low, bucket, self.num_shards)

  def read(self, unit: int, start: int, stop: int) -> np.ndarray:
    """Returns a copy."""
    values = np.empty(stop - start, np.uint32)
    for high, low, at in self._parts(unit, start, stop):
      bits = high.view(np.uint16).astype(np.uint32) << 16
      values[at] = bits + low.astype(np.int32).view(np.uint32)
    return values.view(np.float32)

  def write(self, unit: int, start: int, values: np.ndarray) -> None:
    """Replaces a range, and the working weights."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    for high, low, at in self._parts(unit, start, start + values.size):
      rounded = (bits[at] + np.uint32(0x8000)) >> 16
      high[:] = rounded.astype(np.uint16).view(ml_dtypes.bfloat16)
      low[:] = bits[at].astype(np.uint16).view(np.int16)

  def of_segment(
    self, unit: int, shard: int, weights_out: Shards | None
  ) -> OfSegment:
    """Returns a segment's halves of masters."""
    del weights_out
    return OfSegment(self._high[unit][shard], self._low[unit][shard], None)

  def round_to(self, weights_out: Shards, pool: Pool) -> None:
    """Does nothing: they are rounded."""
    del weights_out, pool

  def _parts(
    self, unit: int, start: int, stop: int
  ) -> Iterator[tuple[np.ndarray, np.ndarray, slice]]:
    """Yields both halves of a range, and where it lies in the range."""
    ends = itertools.accumulate(x.size for x in self._low[unit])
    for high, low, end in zip(
      self._high[unit], self._low[unit], ends, strict=True
    ):
      begin = end - low.size
      first, last = max(start, begin), min(stop, end)
      if first < last:
        inside = slice(first - begin, last - begin)
        yield high[inside], low[inside], slice(first - start, last - start)


def by_unit(array: np.ndarray, bucket: Bucket) -> list[np.ndarray]:
  """Returns one view of a bucket's flat array for each of its wire units."""
  bounds = np.cumsum([unit.size for unit in bucket.units])[:-1]
  return np.split(array, bounds)


def by_shard(
  array: np.ndarray, bucket: Bucket, num_shards: int
) -> list[list[np.ndarray]]:
  """Returns the views of `by_unit`, each cut into shards of equal length."""
  return [np.split(unit, num_shards) for unit in by_unit(array, bucket)]
