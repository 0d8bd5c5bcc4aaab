"""Actions of an emulated device: they take time, and hand over what is made.

Gradients are the same in every step, and new weights go nowhere; but the host
gets and gives them as it does with a device.
"""

from collections.abc import Mapping

import numpy as np

from sojax.cluster.mesh import Placement
from sojax.graph.graph import Task
from sojax.host.wire import WireBuffer, WireRing, WorkingCopy
from sojax.plan.account import ring_counts
from sojax.plan.buckets import Bucket, Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan, WireDtypes
from sojax.plan.residency import Residency
from sojax.runtime.executor import Wait
from sojax.runtime.pace import Pace, sleep_until
from sojax.runtime.step import Step


class PacedWeights:
  """The pinned buffers of weights, without a device to send them to."""

  def __init__(self, layout: Layout, plan: Plan, config: TrainConfig):
    """Allocates the working copy, and the ring for what is not in it."""
    self._layout = layout
    self._residency = Residency.of(layout, plan)
    dtype = WireDtypes.of(plan, config).weight
    placement = Placement.of(None)
    copied = filter(self._residency.is_copied, layout.buckets)
    self._copy = WorkingCopy(copied, dtype, placement)
    self._ring = WireRing(
      ring_counts(layout, plan), dtype=dtype, placement=placement
    )

  @property
  def copied(self) -> dict[int, list[list[np.ndarray]]]:
    """The working copy, which split masters are halves of."""
    return self._copy.shards_inout

  def flow(self, bucket: int) -> bool:
    """Says whether a bucket is sent for uses, rather than when it is new."""
    return self._residency.flows(self._layout.buckets[bucket])

  def buffers(self, bucket: Bucket) -> list[WireBuffer]:
    """Returns where an update writes; may block until a ring has some."""
    if bucket.index in self._copy.buffers:
      return self._copy.buffers[bucket.index]
    return [self._ring.take(unit.shape) for unit in bucket.units]

  def give_back(self, bucket: int, buffers: list[WireBuffer]) -> None:
    """Frees those of a bucket's buffers that are of the ring."""
    if bucket not in self._copy.buffers:
      self._ring.give_back(buffers)


class PacedDevice:
  """Issues tasks of the emulated lanes."""

  def __init__(
    self,
    pace: Pace,
    weights: PacedWeights,
    gradients: Mapping[int, list[list[np.ndarray]]],
    *,
    of_micro_batches: bool,
  ):
    """Remembers what it works with.

    Args:
      pace: says when tasks end.
      weights: where new weights come from.
      gradients: of each bucket that the host updates: the shards of each unit.
      of_micro_batches: whether they are those of one micro-batch, to be added
        up on the host, rather than complete.
    """
    self._pace = pace
    self._weights = weights
    self._gradients = gradients
    self._of_micro_batches = of_micro_batches

  def pass_time(self, task: Task, step: Step) -> Wait:
    """Issues a task that does nothing else."""
    end_s = self._pace.begin(task, step.number)
    return lambda: sleep_until(end_s)

  def grad_out(self, task: Task, step: Step) -> Wait:
    """Issues a bucket's way out; its end hands the step the gradients."""
    index = task.bucket
    assert index is not None
    end_s = self._pace.begin(task, step.number)

    def wait() -> None:
      sleep_until(end_s)
      if self._of_micro_batches:
        step.micro_grads[index, task.micro] = self._gradients[index]
      else:
        step.host_grads[index] = self._gradients[index]

    return wait

  def weight_in(self, task: Task, step: Step) -> Wait | None:
    """Sends what an update has written; or, where weights flow, for a use."""
    bucket = task.bucket
    assert bucket is not None
    buffers = step.wire.pop(bucket, [])
    if not buffers and not self._weights.flow(bucket):
      return None  # skipped: the weights on the device are the right ones
    end_s = self._pace.begin(task, step.number)

    def wait() -> None:
      try:
        sleep_until(end_s)
      finally:
        self._weights.give_back(bucket, buffers)

    return wait
