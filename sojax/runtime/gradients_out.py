"""Gradients on their way to the host."""

import abc

import jax
import numpy as np

from sojax.cluster.mesh import Placement, pinned_host
from sojax.graph.graph import Task
from sojax.host.wire import host_shards
from sojax.runtime.executor import Wait
from sojax.runtime.step import Step


class GradientsOut(abc.ABC):
  """Brings a bucket's gradients to the host.

  Where the device adds up micro-batches, all host buckets of a step have their
  place there, so backward never waits for the host. Where the host does, they
  have it for as many micro-batches as the step graph lets go ahead of the sums.
  """

  def __init__(self, *, of_micro_batches: bool):
    """Remembers what gradients are.

    Args:
      of_micro_batches: whether they are those of one micro-batch, to be added
        up on the host, rather than complete.
    """
    self._of_micro_batches = of_micro_batches

  @abc.abstractmethod
  def grad_out(self, task: Task, step: Step) -> Wait:
    """Issues a bucket's way out; its end hands the step the gradients."""

  @abc.abstractmethod
  def operand(self, task: Task) -> jax.Array | None:
    """Returns what a backward takes to deliver gradients itself."""

  @abc.abstractmethod
  def interrupt(self, first_step: int) -> None:
    """Ends waits for programs that may never deliver, until `reset`.

    Args:
      first_step: the step that has failed; those after it end as well.
    """

  @abc.abstractmethod
  def reset(self) -> None:
    """Makes ready for steps after a failure; no program runs any more."""

  @abc.abstractmethod
  def close(self) -> None:
    """Ends all waits; may be called again."""

  def _hand_over(
    self, task: Task, step: Step, grads: list[list[np.ndarray]]
  ) -> None:
    """Gives a step the shards of each unit of a bucket."""
    assert task.bucket is not None
    if self._of_micro_batches:
      step.micro_grads[task.bucket, task.micro] = grads
    else:
      step.host_grads[task.bucket] = grads


class DmaOut(GradientsOut):
  """Sends what backward returns to pinned host memory that JAX owns.

  The host reads the arrays themselves, without a copy.
  """

  def __init__(self, placement: Placement, *, of_micro_batches: bool):
    super().__init__(of_micro_batches=of_micro_batches)
    self._pinned_host = pinned_host(placement.units)

  def grad_out(self, task: Task, step: Step) -> Wait:
    """Issues the transfer of a bucket's gradients."""
    assert task.bucket is not None
    units = step.units.pop(task.bucket)
    arrays = jax.device_put(list(units), self._pinned_host)

    def wait() -> None:
      grads = [host_shards(array) for array in arrays]
      arrays.clear()  # from now on they live as long as the host needs them
      self._hand_over(task, step, grads)

    return wait

  def operand(self, task: Task) -> None:
    """Returns None: backward returns its gradients."""
    del task

  def interrupt(self, first_step: int) -> None:
    """Does nothing: a transfer of a failed program fails as well."""
    del first_step

  def reset(self) -> None:
    """Does nothing."""

  def close(self) -> None:
    """Does nothing."""
