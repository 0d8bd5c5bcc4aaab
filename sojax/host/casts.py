"""Host buckets that cast in passes of their own, as older systems do."""

from collections.abc import Callable

import numpy as np

from sojax.host.adam import HostBucket
from sojax.host.arena import Arena
from sojax.host.kernels import Pool
from sojax.host.masters import Masters, Shards, by_shard
from sojax.host.segments import AccumulateSegment
from sojax.plan.adamw import AdamScalars
from sojax.plan.buckets import Bucket, Layout
from sojax.plan.casts import SeparateCasts


class SeparatelyCastBucket(HostBucket):
  """A trained bucket whose step is up to three passes over its memory.

  There to compare with: the bits are those of one pass.
  """

  def __init__(
    self,
    bucket: Bucket,
    arena: Arena,
    masters: Masters,
    casts: SeparateCasts,
    wide: np.ndarray,
  ):
    """Allocates the state.

    Args:
      bucket: what it holds.
      arena: has room for its moments.
      masters: its master weights.
      casts: which casts are no part of the update.
      wide: where gradients are widened to, float32 [bucket.size] or more;
        buckets take turns. Not used if they are not widened.
    """
    super().__init__(bucket, arena, masters)
    self._narrows = casts.narrow
    self._wide: Shards | None = None
    if casts.widen:
      assert wide.size >= bucket.size
      self._wide = by_shard(wide[: bucket.size], bucket, masters.num_shards)

  def step(
    self,
    pool: Pool,
    grads: Shards,
    weights_out: Shards,
    scalars: AdamScalars,
    grad_scale: float,
  ) -> None:
    """Widens the gradients, updates the bucket, and rounds its masters."""
    if self._wide is not None:
      _widen(pool, grads, self._wide)
      grads = self._wide
    if not self._narrows:
      super().step(pool, grads, weights_out, scalars, grad_scale)
      return
    pool.adamw_step(self.segments(grads, None), scalars, grad_scale)
    self.masters.round_to(weights_out, pool)


def make_wide_gradients(
  layout: Layout, casts: SeparateCasts, make_arena: Callable[[int], Arena]
) -> np.ndarray:
  """Allocates what the largest of the updated host buckets is widened to.

  Args:
    layout: the model cut into buckets.
    casts: whether gradients are widened in a pass of their own.
    make_arena: makes the arena that it lies in, of so many bytes.

  Returns:
    float32, of length 0 if nothing is widened.
  """
  if not casts.widen:
    return np.empty(0, np.float32)
  num_elems = max((b.size for b in layout.updated_by_host), default=0)
  return make_arena(4 * num_elems).empty(num_elems, np.float32)


def _widen(pool: Pool, grads: Shards, wide_out: Shards) -> None:
  pool.widen(
    [
      AccumulateSegment(wide, grad)
      for unit, unit_out in zip(grads, wide_out, strict=True)
      for grad, wide in zip(unit, unit_out, strict=True)
    ]
  )
