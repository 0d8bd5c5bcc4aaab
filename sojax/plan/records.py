"""What takes updates back that ran ahead of validation, and its bytes."""

import dataclasses
import functools
from collections.abc import Sequence

from sojax.plan.buckets import Bucket, Layout
from sojax.plan.plan import Plan

GROUP_ELEMS = 64
"""Parameters whose codes lie together in a record."""

CHUNK_ELEMS = 1 << 14
"""Parameters of a segment that are recorded together."""

BYTES_PER_PARAM = {"record2": 2, "record3": 3}
"""Bytes of a parameter's codes, by `Plan.speculation`."""


def codes_bytes(lengths: Sequence[int], bytes_per_param: int) -> int:
  """Returns the bytes of all codes: whole groups of 64 for each segment.

  >>> codes_bytes([64, 65, 0], 3)
  576
  """
  return sum(
    -(-n // GROUP_ELEMS) * GROUP_ELEMS * bytes_per_param for n in lengths
  )


def num_offsets(lengths: Sequence[int]) -> int:
  """Returns the offsets of a record: one for each chunk and one more.

  >>> num_offsets([1, 2**14 + 1])
  4
  """
  return sum(-(-n // CHUNK_ELEMS) for n in lengths) + 1


def num_escapes(lengths: Sequence[int], escape_bytes_per_param: float) -> int:
  """Returns the room for values that no code expresses.

  >>> num_escapes([100, 28], 0.5)
  16
  """
  return int(escape_bytes_per_param * sum(lengths)) // 4


def segment_lengths(bucket: Bucket, num_shards: int) -> list[int]:
  """Returns the elements of each segment that a bucket is updated in."""
  return [
    unit.size // num_shards for unit in bucket.units for _ in range(num_shards)
  ]


@dataclasses.dataclass(frozen=True)
class RecordBytes:
  """Bytes of what takes a bucket's update back.

  Attributes:
    dense: of the arrays that are written as a whole: offsets and codes of a
      record, or copies.
    escapes: of the room for escapes.
  """

  dense: tuple[int, ...]
  escapes: int

  @property
  def total(self) -> int:
    """All of them."""
    return sum(self.dense) + self.escapes


def record_bytes(bucket: Bucket, plan: Plan, num_shards: int) -> RecordBytes:
  """Returns what it takes to take a bucket's update back, at most."""
  if plan.speculation == "pingpong":
    return RecordBytes((4 * bucket.size,) * 3, 0)
  return _record_bytes(
    (*segment_lengths(bucket, num_shards),),
    BYTES_PER_PARAM[plan.speculation],
    plan.escape_bytes_per_param,
  )


@functools.lru_cache(maxsize=1024)
def _record_bytes(
  lengths: tuple[int, ...], bytes_per_param: int, escape_bytes_per_param: float
) -> RecordBytes:
  return RecordBytes(
    (8 * num_offsets(lengths), codes_bytes(lengths, bytes_per_param)),
    4 * num_escapes(lengths, escape_bytes_per_param),
  )


def speculating_buckets(layout: Layout, plan: Plan) -> tuple[Bucket, ...]:
  """Returns the buckets that can be updated ahead of validation.

  Those that backward finishes first gain most and are served first, as far as
  `Plan.max_record_bytes` reaches.

  Args:
    layout: the model cut into buckets.
    plan: how updates are taken back, and how much memory that may take.

  Returns:
    The buckets, in their order; none if the plan waits for validation.
  """
  if plan.speculation == "wait" or plan.speculate == "never":
    return ()
  found, used_bytes = [], 0
  for bucket in layout.updated_by_host:
    nbytes = record_bytes(bucket, plan, layout.num_shards).total
    limit = plan.max_record_bytes
    if limit is not None and used_bytes + nbytes > limit:
      break
    found.append(bucket)
    used_bytes += nbytes
  return tuple(found)
