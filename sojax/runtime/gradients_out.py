"""Gradients on their way to the host."""

import abc

import jax
import numpy as np

from sojax.cluster.mesh import Placement
from sojax.graph.graph import Task
from sojax.runtime.executor import Wait
from sojax.runtime.step import Step


class GradientsOut(abc.ABC):
  """Brings a bucket's gradients to the host.

  All host buckets of a step have their place there, so backward never waits
  for the host.
  """

  @abc.abstractmethod
  def grad_out(self, task: Task, step: Step) -> Wait:
    """Issues a bucket's way out; its end leaves `step.host_grads`."""

  @abc.abstractmethod
  def operand(self, stage: int) -> jax.Array | None:
    """Returns what the stage's backward takes to deliver gradients itself."""

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


class DmaOut(GradientsOut):
  """Sends what backward returns to pinned host memory that JAX owns.

  The host reads the arrays themselves, without a copy.
  """

  def __init__(self, placement: Placement):
    self._pinned_host = placement.pinned_host

  def grad_out(self, task: Task, step: Step) -> Wait:
    """Issues the transfer of a bucket's gradients."""
    assert task.bucket is not None
    bucket = task.bucket
    units = step.units.pop(bucket)
    arrays = jax.device_put(list(units), self._pinned_host)

    def wait() -> None:
      step.host_grads[bucket] = [np.asarray(array) for array in arrays]

    return wait

  def operand(self, stage: int) -> None:
    """Returns None: backward returns its gradients."""
    del stage

  def interrupt(self, first_step: int) -> None:
    """Does nothing: a transfer of a failed program fails as well."""
    del first_step

  def reset(self) -> None:
    """Does nothing."""

  def close(self) -> None:
    """Does nothing."""
