"""Host buckets: master weights and moments in the arena, and their step."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from sojax.host.arena import Arena
from sojax.host.kernels import Pool
from sojax.host.masters import Masters, by_shard, by_unit
from sojax.host.segments import Segment
from sojax.plan.adamw import AdamScalars
from sojax.plan.buckets import Bucket

_CHUNK_ELEMS = 1 << 22


class HostBucket:
  """The state of one bucket on the host.

  Attributes:
    bucket: what it holds.
    masters: its master weights.
    moments: "mu" and "nu", each float32 [bucket.size]; none of a bucket that is
      not trained. They begin with zeros.
  """

  def __init__(self, bucket: Bucket, arena: Arena, masters: Masters):
    self.bucket = bucket
    self.masters = masters
    self.moments = {
      kind: arena.empty(bucket.size, np.float32) for kind in moments(bucket)
    }
    # Cut once: a step of a small bucket takes no longer than that.
    self._moment_shards = {
      kind: by_shard(array, bucket, masters.num_shards)
      for kind, array in self.moments.items()
    }

  def read(self, kind: str, unit: int, start: int, stop: int) -> np.ndarray:
    """Returns a range of the state of a wire unit; it may be a view.

    Args:
      kind: "master", "mu" or "nu".
      unit: number of the unit.
      start: first element.
      stop: end of the range.

    Returns:
      float32 [stop - start].
    """
    if kind == "master":
      return self.masters.read(unit, start, stop)
    return by_unit(self.moments[kind], self.bucket)[unit][start:stop]

  def write(self, kind: str, unit: int, start: int, values: np.ndarray) -> None:
    """Replaces a range of the state of a wire unit; see `read`."""
    if kind == "master":
      self.masters.write(unit, start, values)
      return
    array = by_unit(self.moments[kind], self.bucket)[unit]
    array[start : start + values.size] = values

  def step(
    self,
    pool: Pool,
    grads: Sequence[Sequence[np.ndarray]],
    weights_out: Sequence[Sequence[np.ndarray]],
    scalars: AdamScalars,
    grad_scale: float,
  ) -> None:
    """Updates the bucket in place; blocks without the GIL.

    Args:
      pool: runs the kernel.
      grads: the shards of each wire unit's gradient, in order: flat, float32,
        bfloat16 or float16.
      weights_out: where the new weights go: likewise.
      scalars: the scalars of this step.
      grad_scale: multiplies every gradient first.
    """
    pool.adamw_step(self.segments(grads, weights_out), scalars, grad_scale)

  def segments(
    self,
    grads: Sequence[Sequence[np.ndarray]],
    weights_out: Sequence[Sequence[np.ndarray]] | None,
  ) -> list[Segment]:
    """Returns the arrays of a step, one segment for each shard.

    Args:
      grads: as for `step`.
      weights_out: likewise; None writes no weights.
    """
    mus, nus = self._moment_shards.values()
    return [
      Segment(
        mu_inout=mus[unit][shard],
        nu_inout=nus[unit][shard],
        grad=grad,
        **self.masters.of_segment(unit, shard, weights_out)._asdict(),
      )
      for unit, shards in enumerate(grads)
      for shard, grad in enumerate(shards)
    ]


def moments(bucket: Bucket) -> tuple[str, ...]:
  """Returns the names of a bucket's moments."""
  return ("mu", "nu") if bucket.trained else ()


def arena_bytes(buckets: Sequence[Bucket], *, master_bytes: int) -> int:
  """Returns the capacity of an arena that holds the state of these buckets.

  Args:
    buckets: the buckets.
    master_bytes: what the arena holds of each master: 4, or 2 of a split one.
  """
  return Arena.bytes_for(
    elem_bytes * bucket.size
    for bucket in buckets
    for elem_bytes in (master_bytes, *(4 for _ in moments(bucket)))
  )


def like_shards(
  array: np.ndarray, shards: Sequence[np.ndarray]
) -> list[np.ndarray]:
  """Returns views of a flat array, one as long as each of the shards."""
  return np.split(array, np.cumsum([shard.size for shard in shards])[:-1])


def write_weights(master: np.ndarray, weights_out: np.ndarray) -> None:
  """Writes working weights from masters, rounded as in the kernel's store.

  Args:
    master: float32 [n].
    weights_out: float32, float16 or bfloat16 [n]. float16 gets the nearest
      value, ties to even, and 0x7e00 for NaN; bfloat16 the nearest, ties away
      from zero, and 0x7fc0 for NaN.
  """
  if weights_out.dtype == np.float32:
    weights_out[:] = master
    return
  if weights_out.dtype == np.float16:
    with np.errstate(over="ignore"):  # to Inf, as in the kernel
      weights_out[:] = master
    weights_out.view(np.uint16)[np.isnan(master)] = 0x7E00
    return
  assert weights_out.dtype == ml_dtypes.bfloat16, weights_out.dtype
  for start in range(0, master.size, _CHUNK_ELEMS):
    part = master[start : start + _CHUNK_ELEMS]
    half = ((part.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)
    half[np.isnan(part)] = 0x7FC0
    weights_out[start : start + _CHUNK_ELEMS] = half.view(ml_dtypes.bfloat16)
