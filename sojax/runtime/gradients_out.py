"""Gradients on their way to the host, by DMA into pinned memory."""

import jax

from sojax.cluster.mesh import Placement, pinned_host
from sojax.graph.graph import Task
from sojax.host.wire import host_shards
from sojax.runtime.executor import Wait
from sojax.runtime.step import Step


class GradientsOut:
  """Sends a bucket's gradients to pinned host memory that JAX owns.

  All host buckets of a step have their place there, so backward never waits
  for the host. The host reads the arrays themselves, without a copy.
  """

  def __init__(self, placement: Placement):
    self._pinned_host = pinned_host(placement.units)

  def grad_out(self, task: Task, step: Step) -> Wait:
    """Issues the transfer of a bucket's gradients."""
    assert task.bucket is not None
    bucket = task.bucket
    units = step.units.pop(bucket)
    arrays = jax.device_put(list(units), self._pinned_host)

    def wait() -> None:
      step.host_grads[bucket] = [host_shards(array) for array in arrays]

    return wait
