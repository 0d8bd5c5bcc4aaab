"""Host buckets: master weights and moments in the arena, and their step."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from sojax.host.arena import Arena
from sojax.host.kernels import Pool, Segment
from sojax.plan.adamw import AdamScalars
from sojax.plan.buckets import Bucket

_CHUNK_ELEMS = 1 << 22


class HostBucket:
  """The state of one bucket on the host.

  Attributes:
    bucket: what it holds.
    arrays: "master", "mu" and "nu", each float32 [bucket.size]; a bucket that
      is not trained has "master" only.
  """

  def __init__(self, bucket: Bucket, arena: Arena):
    self.bucket = bucket
    self.arrays = {
      kind: arena.empty(bucket.size, np.float32) for kind in kinds(bucket)
    }
    for kind in kinds(bucket):
      self.arrays[kind].fill(0.0)

  def units(self, kind: str) -> list[np.ndarray]:
    """Returns one flat view of an array per wire unit of the bucket."""
    bounds = np.cumsum([unit.size for unit in self.bucket.units])[:-1]
    return np.split(self.arrays[kind], bounds)

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
    segments = []
    for grad, out, *state in zip(
      grads, weights_out, *map(self.units, kinds(self.bucket)), strict=True
    ):
      shards = [like_shards(array, grad) for array in state]
      segments += map(Segment, *shards, grad, out)
    pool.adamw_step(segments, scalars, grad_scale)


def kinds(bucket: Bucket) -> tuple[str, ...]:
  """Returns the names of the arrays that a bucket's state consists of."""
  return ("master", "mu", "nu") if bucket.trained else ("master",)


def arena_bytes(buckets: Sequence[Bucket]) -> int:
  """Returns the capacity of an arena that holds the state of these buckets."""
  return Arena.bytes_for(
    [4 * bucket.size for bucket in buckets for _ in kinds(bucket)]
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
