"""Gradients on their way to the host, by DMA into pinned memory."""

import jax

from sojax.cluster.mesh import Placement, pinned_host
from sojax.graph.graph import Task
from sojax.host.wire import host_shards
from sojax.runtime.executor import Wait
from sojax.runtime.step import Step


class GradientsOut:
  """Sends a bucket's gradients to pinned host memory that JAX owns.

  Where the device adds up micro-batches, all host buckets of a step have their
  place there, so backward never waits for the host. Where the host does, they
  have it for as many micro-batches as the step graph lets go ahead of the sums.
  The host reads the arrays themselves, without a copy.
  """

  def __init__(self, placement: Placement, *, of_micro_batches: bool):
    """Remembers where gradients go.

    Args:
      placement: the mesh.
      of_micro_batches: whether they are those of one micro-batch, to be added
        up on the host, rather than complete.
    """
    self._pinned_host = pinned_host(placement.units)
    self._of_micro_batches = of_micro_batches

  def grad_out(self, task: Task, step: Step) -> Wait:
    """Issues the transfer of a bucket's gradients."""
    assert task.bucket is not None
    bucket = task.bucket
    units = step.units.pop(bucket)
    arrays = jax.device_put(list(units), self._pinned_host)

    def wait() -> None:
      grads = [host_shards(array) for array in arrays]
      arrays.clear()  # from now on they live as long as the host needs them
      if self._of_micro_batches:
        step.micro_grads[bucket, task.micro] = grads
      else:
        step.host_grads[bucket] = grads

    return wait
