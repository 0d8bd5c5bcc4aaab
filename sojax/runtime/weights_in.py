"""Weights on their way to the device, and the parameters that stages use.

Weight-stationary: the device keeps a stage's working weights; each update's
result replaces them, by way of a ring of pinned buffers. Weight-flow: a pinned
copy on the host is the working weights; each use of the stage gets its own copy
on the device, which is gone after the use, or after the backward that follows
the use.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from sojax.graph.graph import Task, TaskKind
from sojax.host.adam import like_shards, write_weights
from sojax.host.wire import WireBuffer, WireRing, WorkingCopy
from sojax.plan.account import ring_counts
from sojax.plan.buckets import Bucket
from sojax.plan.plan import WireDtypes
from sojax.plan.residency import Residency
from sojax.runtime.executor import Wait
from sojax.runtime.parameters import make_parameters
from sojax.runtime.setup import Setup
from sojax.runtime.step import Step

Masters = Callable[[Bucket], Sequence[np.ndarray]]
"""Returns the float32 masters of a bucket, one flat array per wire unit."""


class Weights:
  """Working weights, as stages take them and as updates replace them."""

  def __init__(self, setup: Setup, working_copy: WorkingCopy):
    """Makes the ring; the weights are not loaded yet.

    Args:
      setup: the model, and the way it is trained.
      working_copy: what the buckets that have a part in it are sent from.
    """
    self._layout = setup.layout
    self._residency = Residency.of(setup.layout, setup.plan)
    self._split = setup.plan.master == "split"
    self._copies = working_copy.buffers
    self._placement = setup.placement
    self._dtype = WireDtypes.of(setup.plan, setup.config).weight
    self._ring = WireRing(
      ring_counts(setup.layout, setup.plan),
      dtype=self._dtype,
      placement=setup.placement,
    )
    self._parameters = make_parameters(
      setup.split,
      setup.layout,
      setup.config.working_dtype,
      setup.placement,
    )

  def load(self, masters: Masters) -> None:
    """Replaces all working weights by roundings of the masters.

    The working copy of split masters is a part of them. No step may be under
    way.
    """
    self._ring.reset()
    for bucket in self._layout.buckets:
      copied = bucket.index in self._copies
      if copied and not self._split:
        self._write_copy(bucket, masters(bucket))
      if self._residency.flows(bucket):
        continue
      if copied:
        self.arrive(bucket, self._send(self._copies[bucket.index]))
        continue
      units = [
        self._from_master(unit.shape, master)
        for unit, master in zip(bucket.units, masters(bucket), strict=True)
      ]
      self.arrive(bucket, units)

  def arrive(self, bucket: Bucket, units: Sequence[jax.Array]) -> None:
    """Takes the weights of a bucket that stay on the device, ready or not.

    They take the place of the old ones.
    """
    assert not self._residency.flows(bucket), bucket.index
    self._parameters.arrive(bucket, units)

  def buffers(self, bucket: Bucket) -> list[WireBuffer]:
    """Returns where an update writes the bucket's new weights.

    That is its part of the working copy; or else buffers of the ring: waits
    until some are free.
    """
    if bucket.index in self._copies:
      return self._copies[bucket.index]
    return [self._ring.take(unit.shape) for unit in bucket.units]

  def weight_in(self, task: Task, step: Step) -> Wait | None:
    """Issues the transfer of a bucket's weights to the device.

    Those that flow are for one use; the others replace the old ones.
    """
    assert task.bucket is not None
    bucket = self._layout.buckets[task.bucket]
    if self._residency.flows(bucket):
      units = self._send(self._copies[bucket.index])
      step.fetched[task.index] = bucket, units
      return lambda: jax.block_until_ready(units)
    buffers = step.wire.pop(task.bucket, None)
    if buffers is None:
      return None  # skipped: the weights on the device are the right ones
    return self._replace(bucket, buffers)

  def of_use(self, task: Task, step: Step) -> tuple[jax.Array, ...]:
    """Returns the parameters, by place, that a forward or backward uses."""
    assert task.stage is not None
    stay = self._residency.stay(task.stage)
    if stay and task.kind is TaskKind.BACKWARD:
      return step.params.pop(task.stage)
    fetched = [step.fetched.pop(i) for i in task.deps if i in step.fetched]
    params = self._parameters.of_stage(task.stage, dict(fetched))
    if stay:
      step.params[task.stage] = params
    return params

  def of_evaluation(
    self, stage: int, *, after: jax.Array
  ) -> tuple[jax.Array, ...]:
    """Returns a stage's parameters outside of steps.

    Args:
      stage: the stage.
      after: the stage's input; weights that flow wait for it, so that few are
        on the device at once.
    """
    flowing = self._residency.flowing_to(stage)
    if not flowing:
      return self._parameters.of_stage(stage, {})
    after.block_until_ready()
    fetched = {b: self._send(self._copies[b.index]) for b in flowing}
    # Buffers must stay as they are until they have arrived.
    jax.block_until_ready(list(fetched.values()))
    return self._parameters.of_stage(stage, fetched)

  def _replace(self, bucket: Bucket, buffers: list[WireBuffer]) -> Wait:
    """Sends what the update wrote; its end frees the buffers."""
    units = self._send(buffers)
    self.arrive(bucket, units)
    copied = bucket.index in self._copies

    def wait() -> None:
      try:
        jax.block_until_ready(units)
      finally:
        if not copied:
          self._ring.give_back(buffers)

    return wait

  def _write_copy(self, bucket: Bucket, masters: Sequence[np.ndarray]) -> None:
    buffers = self._copies[bucket.index]
    for buffer, master in zip(buffers, masters, strict=True):
      shards = like_shards(master, buffer.shards_inout)
      for part, shard in zip(shards, buffer.shards_inout, strict=True):
        write_weights(part, shard)

  def _from_master(
    self, shape: tuple[int, ...], master: np.ndarray
  ) -> jax.Array:
    weights = np.empty(master.shape, jax.numpy.dtype(self._dtype))
    write_weights(master, weights)
    return jax.device_put(weights.reshape(shape), self._placement.units)

  def _send(self, buffers: Sequence[WireBuffer]) -> list[jax.Array]:
    arrays = [buffer.array for buffer in buffers]
    return jax.device_put(arrays, self._placement.units)
