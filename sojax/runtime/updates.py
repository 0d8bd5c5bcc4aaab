"""Sums and updates of host buckets, and updates of device buckets."""

from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np

from sojax.graph.graph import Task
from sojax.host.adam import HostBucket
from sojax.host.kernels import Pool
from sojax.host.speculation import SpeculativeBucket
from sojax.host.sums import GradientSums
from sojax.host.wire import WireBuffer
from sojax.plan.buckets import Bucket, Layout
from sojax.programs.device_update import make_device_update, scalar_array
from sojax.runtime.executor import Wait
from sojax.runtime.setup import Setup
from sojax.runtime.speculation import NormSource, Outcome
from sojax.runtime.state import TrainState
from sojax.runtime.step import HostVerdict, Step
from sojax.runtime.weights_in import Weights


class HostSums:
  """Adds up the micro-batches of a host bucket."""

  def __init__(
    self,
    layout: Layout,
    sums: GradientSums,
    pool: Pool,
    *,
    num_micro_batches: int,
  ):
    self._layout = layout
    self._sums = sums
    self._pool = pool
    self._last_micro = num_micro_batches - 1

  def host_accumulate(self, task: Task, step: Step) -> None:
    """Adds a micro-batch's gradients, which then have left the host.

    The last one's sums are what the update takes.
    """
    assert task.bucket is not None
    bucket = self._layout.buckets[task.bucket]
    last = task.micro == self._last_micro
    self._sums.add(
      self._pool,
      bucket,
      step.micro_grads.pop((task.bucket, task.micro)),
      first=task.micro == 0,
      last=last,
    )
    if last:
      step.host_grads[task.bucket] = self._sums.units(bucket)
      step.speculation.watch.add(
        NormSource.HOST_SUMS, self._sums.squares(bucket)
      )


class NewWeights(Protocol):
  """Where updates write new weights."""

  def buffers(self, bucket: Bucket) -> list[WireBuffer]:
    """Returns those of each wire unit of a bucket; may block."""
    ...


class HostUpdates:
  """Updates host buckets, after the step's validation or ahead of it."""

  def __init__(
    self,
    buckets: Mapping[int, HostBucket],
    weights: NewWeights,
    pool: Pool,
    *,
    unclipped: Callable[[Step], float],
  ):
    """Remembers what it works on.

    Args:
      buckets: the host buckets, by bucket index.
      weights: where new weights go.
      pool: runs the kernels.
      unclipped: returns the grad_scale of a step that is not clipped, to the
        bit.
    """
    self._all = buckets
    self._weights = weights
    self._unclipped = unclipped
    self._pool = pool

  def host_update(self, task: Task, step: Step) -> None:
    """Updates a bucket, or drops its gradients if the step is skipped.

    Where the schedule has it ahead of Validate, it may be that Validate has
    ended all the same; or that the step is not to be speculated on any more:
    then the bucket is left to `host_settle`.
    """
    assert task.bucket is not None
    if step.host_verdict is not None:
      self._update(task.bucket, step, step.host_verdict)
      return
    speculation = step.speculation
    reason = speculation.why_not(self._unclipped(step))
    step.notes[task.index] = reason or f"ahead: {speculation.reason}"
    if reason is None:
      self._speculate(task.bucket, step)

  def host_settle(self, task: Task, step: Step) -> None:
    """Commits an update that ran ahead, takes it back, or takes it again.

    A bucket whose update did not run ahead gets it now.
    """
    assert task.bucket is not None and step.host_verdict is not None
    outcome = self._settle(task.bucket, step, step.host_verdict)
    step.speculation.outcomes[task.bucket] = outcome
    step.notes[task.index] = str(outcome)

  def take_back(self, step: Step) -> None:
    """Takes a step that failed before its validation out of the buckets.

    Nothing of it may run any more. All working weights are to be loaded anew.
    """
    for index in step.speculation.ran:
      bucket = self._speculative(index)
      if bucket.pending:
        bucket.undo(self._pool)

  def _speculate(self, index: int, step: Step) -> None:
    bucket = self._speculative(index)
    speculation = step.speculation
    scalars = step.scalars[_group(bucket.bucket)]
    grads = step.host_grads[index]
    speculation.ran.append(index)
    buffers = self._buffers(bucket.bucket, step)
    speculation.in_doubt.add(index)
    sumsq = bucket.speculate(
      self._pool,
      grads,
      buffers,
      scalars,
      self._unclipped(step),
      sum_squares=speculation.watch.source is NormSource.UPDATES,
    )
    speculation.in_doubt.remove(index)
    if sumsq is not None:
      speculation.watch.add(NormSource.UPDATES, sumsq)
    del step.host_grads[index]  # the bucket has them until it is settled
    speculation.record_bytes += bucket.used_bytes()
    speculation.num_escapes += bucket.num_escapes()

  def _settle(self, index: int, step: Step, verdict: HostVerdict) -> Outcome:
    if index not in step.speculation.ran:
      if index in step.host_grads:
        self._update(index, step, verdict)
      return Outcome.LATE
    bucket = self._speculative(index)
    if not verdict.finite:
      step.speculation.in_doubt.add(index)
      bucket.undo(self._pool)
      step.speculation.in_doubt.remove(index)
      bucket.masters.round_to(self._buffers(bucket.bucket, step), self._pool)
      return Outcome.UNDONE
    if verdict.grad_scale != self._unclipped(step):
      buffers = self._buffers(bucket.bucket, step)
      bucket.redo(self._pool, buffers, verdict.grad_scale)
      return Outcome.REDONE
    if not bucket.commit(self._pool):
      bucket.masters.round_to(self._buffers(bucket.bucket, step), self._pool)
    return Outcome.COMMITTED

  def _update(self, index: int, step: Step, verdict: HostVerdict) -> None:
    grads = step.host_grads.pop(index)
    if not verdict.finite:
      return
    bucket = self._all[index]
    bucket.step(
      self._pool,
      grads,
      self._buffers(bucket.bucket, step),
      step.scalars[_group(bucket.bucket)],
      verdict.grad_scale,
    )

  def _buffers(self, bucket: Bucket, step: Step) -> list[list[np.ndarray]]:
    """Returns where new weights go; WeightIn or WeightResend sends them."""
    buffers = self._weights.buffers(bucket)
    step.wire[bucket.index] = buffers
    return [buffer.shards_inout for buffer in buffers]

  def forget(self) -> None:
    """Drops what could take updates back; the state has been replaced."""
    for bucket in self._all.values():
      if isinstance(bucket, SpeculativeBucket):
        bucket.forget()

  def _speculative(self, index: int) -> SpeculativeBucket:
    bucket = self._all[index]
    assert isinstance(bucket, SpeculativeBucket)
    return bucket


def _group(bucket: Bucket) -> int:
  assert bucket.group is not None
  return bucket.group


class DeviceUpdates:
  """Dispatches the update of a device bucket."""

  def __init__(self, setup: Setup, state: TrainState, weights: Weights):
    self._layout = setup.layout
    self._state = state
    self._weights = weights
    self._device = setup.placement.device
    self._update = make_device_update(
      setup.config.working_dtype, setup.placement
    )

  def device_update(self, task: Task, step: Step) -> Wait:
    """Issues the update; the device itself holds the state if it is skipped."""
    assert task.bucket is not None and step.verdict is not None
    bucket: Bucket = self._layout.buckets[task.bucket]
    step.state_touched = True
    scalars = scalar_array(step.scalars[_group(bucket)])
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
