"""Sums and updates of host buckets, and updates of device buckets."""

import jax

from sojax.cluster.mesh import Placement
from sojax.graph.graph import Task
from sojax.host.kernels import Pool
from sojax.host.sums import GradientSums
from sojax.plan.buckets import Bucket, Layout
from sojax.programs.device_update import make_device_update, scalar_array
from sojax.runtime.executor import Wait
from sojax.runtime.state import TrainState
from sojax.runtime.step import Step
from sojax.runtime.weights_in import Weights


class HostSums:
  """Adds up the micro-batches of a host bucket."""

  def __init__(self, layout: Layout, sums: GradientSums, pool: Pool):
    self._layout = layout
    self._sums = sums
    self._pool = pool

  def host_accumulate(self, task: Task, step: Step) -> None:
    """Adds a micro-batch's gradients, which then have left the host.

    The last one's sums are what the update takes.
    """
    assert task.bucket is not None
    bucket = self._layout.buckets[task.bucket]
    last = task.micro == len(step.batches) - 1
    self._sums.add(
      self._pool,
      bucket,
      step.micro_grads.pop((task.bucket, task.micro)),
      first=task.micro == 0,
      last=last,
    )
    if last:
      step.host_grads[task.bucket] = self._sums.units(bucket)


class HostUpdates:
  """Runs the kernel on a host bucket."""

  def __init__(
    self, layout: Layout, state: TrainState, weights: Weights, pool: Pool
  ):
    self._layout = layout
    self._state = state
    self._weights = weights
    self._pool = pool

  def host_update(self, task: Task, step: Step) -> None:
    """Updates a bucket, or drops its gradients if the step is skipped."""
    assert task.bucket is not None and step.host_verdict is not None
    grads = step.host_grads.pop(task.bucket)
    if not step.host_verdict.finite:
      return
    bucket = self._layout.buckets[task.bucket]
    buffers = self._weights.buffers(bucket)
    step.wire[task.bucket] = buffers
    assert bucket.group is not None
    self._state.host[task.bucket].step(
      self._pool,
      grads,
      [buffer.shards_inout for buffer in buffers],
      step.scalars[bucket.group],
      step.host_verdict.grad_scale,
    )


class DeviceUpdates:
  """Dispatches the update of a device bucket."""

  def __init__(
    self,
    layout: Layout,
    state: TrainState,
    weights: Weights,
    working_dtype: str,
    placement: Placement,
  ):
    self._layout = layout
    self._state = state
    self._weights = weights
    self._device = placement.device
    self._update = make_device_update(working_dtype, placement)

  def device_update(self, task: Task, step: Step) -> Wait:
    """Issues the update; the device itself holds the state if it is skipped."""
    assert task.bucket is not None and step.verdict is not None
    bucket: Bucket = self._layout.buckets[task.bucket]
    assert bucket.group is not None
    step.state_touched = True
    scalars = scalar_array(step.scalars[bucket.group])
    new_state, weights, ended = self._update(
      self._state.device[task.bucket],
      step.units.pop(task.bucket),
      jax.device_put(scalars, self._device),
      step.verdict.grad_scale,
      step.verdict.finite,
    )
    self._state.device[task.bucket] = new_state
    self._weights.arrive(bucket, weights or new_state.master)
    return lambda: jax.block_until_ready(ended)
