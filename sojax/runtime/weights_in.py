"""Weights on their way to the device, and the parameters that stages use.

Weight-stationary: the device keeps the working weights; each update's result
goes through a ring of pinned buffers and replaces them. Weight-flow: a pinned
copy on the host is the working weights; each use of a stage gets its own copy
on the device, which is gone after the use.
"""

import abc
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from sojax.cluster.mesh import Placement
from sojax.graph.graph import Task
from sojax.host.adam import like_shards, write_weights
from sojax.host.wire import WireBuffer, WireRing
from sojax.plan.account import ring_counts
from sojax.plan.buckets import Bucket, Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan, WireDtypes
from sojax.programs.split_model import SplitModel
from sojax.runtime.executor import Wait
from sojax.runtime.parameters import make_parameters
from sojax.runtime.step import Step

Masters = Mapping[int, Sequence[np.ndarray]]
"""Float32 masters of every bucket, one flat array per wire unit."""


class Weights(abc.ABC):
  """Working weights, as stages take them and as updates replace them."""

  def __init__(
    self,
    split: SplitModel,
    layout: Layout,
    plan: Plan,
    config: TrainConfig,
    placement: Placement,
  ):
    self._layout = layout
    self._plan = plan
    self._placement = placement
    self._wire = WireDtypes.of(plan, config)
    self._make_parameters = functools.partial(
      make_parameters, split, layout, config.working_dtype, placement
    )
    self._allocate()

  @abc.abstractmethod
  def _allocate(self) -> None:
    """Makes the pinned buffers."""

  @abc.abstractmethod
  def load(self, masters: Masters) -> None:
    """Replaces all working weights by roundings of the masters.

    No step may be under way.
    """

  @abc.abstractmethod
  def buffers(self, bucket: Bucket) -> list[WireBuffer]:
    """Returns where an update writes the bucket's new weights; may block."""

  @abc.abstractmethod
  def arrive(self, bucket: Bucket, units: Sequence[jax.Array]) -> None:
    """Takes a bucket's new weights on the device, ready or not."""

  @abc.abstractmethod
  def weight_in(self, task: Task, step: Step) -> Wait | None:
    """Issues the transfer of a bucket's weights to the device."""

  @abc.abstractmethod
  def of_use(self, task: Task, step: Step) -> tuple[jax.Array, ...]:
    """Returns the parameters, by place, that a forward or backward uses."""

  @abc.abstractmethod
  def of_evaluation(
    self, stage: int, *, after: jax.Array
  ) -> tuple[jax.Array, ...]:
    """Returns a stage's parameters outside of steps.

    Args:
      stage: the stage.
      after: the stage's input; weights that flow wait for it, so that few are
        on the device at once.
    """


class StationaryWeights(Weights):
  """Working weights that stay on the device."""

  def _allocate(self) -> None:
    self._ring = WireRing(
      ring_counts(self._layout, self._plan),
      dtype=self._wire.weight,
      placement=self._placement,
    )
    self._parameters = self._make_parameters()

  def load(self, masters: Masters) -> None:
    """Rounds the masters and places them."""
    self._ring.reset()
    for bucket in self._layout.buckets:
      units = [
        self._from_master(unit.shape, master)
        for unit, master in zip(
          bucket.units, masters[bucket.index], strict=True
        )
      ]
      self.arrive(bucket, units)

  def arrive(self, bucket: Bucket, units: Sequence[jax.Array]) -> None:
    """Takes the place of the bucket's old weights."""
    self._parameters.arrive(bucket, units)

  def buffers(self, bucket: Bucket) -> list[WireBuffer]:
    """Takes buffers out of the ring; waits until some are free."""
    return [self._ring.take(unit.shape) for unit in bucket.units]

  def weight_in(self, task: Task, step: Step) -> Wait | None:
    """Sends what the update wrote; its end frees the buffers."""
    assert task.bucket is not None
    buffers = step.wire.pop(task.bucket, None)
    if buffers is None:
      return None  # skipped: the weights on the device are the right ones
    units = _send(buffers, self._placement)
    self.arrive(self._layout.buckets[task.bucket], units)

    def wait() -> None:
      try:
        jax.block_until_ready(units)
      finally:
        self._ring.give_back(buffers)

    return wait

  def of_evaluation(
    self, stage: int, *, after: jax.Array
  ) -> tuple[jax.Array, ...]:
    """Returns the parameters that are there."""
    del after
    return self._of_stage(stage)

  def of_use(self, task: Task, step: Step) -> tuple[jax.Array, ...]:
    """Returns the parameters that are there."""
    del step
    assert task.stage is not None
    return self._of_stage(task.stage)

  def _of_stage(self, stage: int) -> tuple[jax.Array, ...]:
    """What a stage borrows, its owner has unpacked."""
    return self._parameters.of_stage(stage, self._layout.of_stage(stage))

  def _from_master(
    self, shape: tuple[int, ...], master: np.ndarray
  ) -> jax.Array:
    weights = np.empty(master.shape, jax.numpy.dtype(self._wire.weight))
    write_weights(master, weights)
    return jax.device_put(weights.reshape(shape), self._placement.units)


class FlowingWeights(Weights):
  """Working weights that live in pinned host memory."""

  def _allocate(self) -> None:
    self._buffers = {
      bucket.index: [
        WireBuffer(unit.shape, self._wire.weight, self._placement)
        for unit in bucket.units
      ]
      for bucket in self._layout.buckets
    }

  def load(self, masters: Masters) -> None:
    """Rounds the masters into the pinned copy."""
    for index, buffers in self._buffers.items():
      for buffer, master in zip(buffers, masters[index], strict=True):
        shards = like_shards(master, buffer.shards_inout)
        for part, shard in zip(shards, buffer.shards_inout, strict=True):
          write_weights(part, shard)

  def buffers(self, bucket: Bucket) -> list[WireBuffer]:
    """Returns the bucket's part of the pinned copy."""
    return self._buffers[bucket.index]

  def arrive(self, bucket: Bucket, units: Sequence[jax.Array]) -> None:
    """Is never called: device buckets do not flow."""
    raise AssertionError(f"bucket {bucket.index} has a home on the device")

  def weight_in(self, task: Task, step: Step) -> Wait:
    """Sends a bucket for one use of one stage."""
    assert task.bucket is not None
    bucket = self._layout.buckets[task.bucket]
    units = _send(self._buffers[bucket.index], self._placement)
    step.fetched[task.index] = bucket, units
    return lambda: jax.block_until_ready(units)

  def of_use(self, task: Task, step: Step) -> tuple[jax.Array, ...]:
    """Returns the leaves that were sent for this use."""
    assert task.stage is not None
    fetched = [step.fetched.pop(i) for i in task.deps if i in step.fetched]
    return self._take(task.stage, dict(fetched))

  def of_evaluation(
    self, stage: int, *, after: jax.Array
  ) -> tuple[jax.Array, ...]:
    """Sends the leaves once the input is there; waits for them."""
    after.block_until_ready()
    arrived = {
      bucket: _send(self._buffers[bucket.index], self._placement)
      for bucket in self._layout.used_by(stage)
    }
    # Buffers must stay as they are until they have arrived.
    jax.block_until_ready(list(arrived.values()))
    return self._take(stage, arrived)

  def _take(
    self, stage: int, arrived: Mapping[Bucket, Sequence[jax.Array]]
  ) -> tuple[jax.Array, ...]:
    parameters = self._make_parameters()
    for bucket, units in arrived.items():
      parameters.arrive(bucket, units)
    return parameters.of_stage(stage, tuple(arrived))


def make_weights(
  split: SplitModel,
  layout: Layout,
  plan: Plan,
  config: TrainConfig,
  placement: Placement,
) -> Weights:
  """Returns the kind of working weights that a plan asks for; not loaded."""
  kind = {"stationary": StationaryWeights, "flow": FlowingWeights}[plan.weights]
  return kind(split, layout, plan, config, placement)


def _send(
  buffers: Sequence[WireBuffer], placement: Placement
) -> list[jax.Array]:
  arrays = [buffer.array for buffer in buffers]
  return jax.device_put(arrays, placement.units)
