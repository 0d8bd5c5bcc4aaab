"""Stage inputs on their way to the host and back, in stages that offload."""

import jax

from sojax.cluster.mesh import Placement, pinned_host
from sojax.graph.graph import Task
from sojax.runtime.executor import Wait
from sojax.runtime.step import Step


class Activations:
  """Sends stage inputs to pinned host memory that JAX owns, and fetches them.

  Nothing here writes those arrays: each is made by one transfer and read by
  another.
  """

  def __init__(self, placement: Placement):
    self._rows = placement.rows

  def activation_out(self, task: Task, step: Step) -> Wait:
    """Issues the transfer of a stage's input, which its forward still reads."""
    assert task.stage is not None
    on_host = jax.device_put(step.inputs[task.stage], pinned_host(self._rows))
    step.offloaded[task.stage] = on_host
    return lambda: jax.block_until_ready(on_host)

  def activation_in(self, task: Task, step: Step) -> Wait:
    """Issues the way back; the copy on the host is gone after it."""
    assert task.stage is not None
    on_device = jax.device_put(step.offloaded.pop(task.stage), self._rows)
    step.inputs[task.stage] = on_device
    return lambda: jax.block_until_ready(on_device)
