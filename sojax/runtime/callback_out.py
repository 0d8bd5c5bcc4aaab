"""Gradients that backward delivers to the host while it runs."""

import jax
import numpy as np

from sojax.cluster.mesh import Placement
from sojax.graph.graph import Task
from sojax.host.transports import SINKS
from sojax.host.wire import WireBuffer
from sojax.plan.buckets import Layout
from sojax.runtime.executor import Wait
from sojax.runtime.gradients_out import GradientsOut
from sojax.runtime.step import Step


class CallbackOut(GradientsOut):
  """Waits for what backward puts into pinned buffers, allocated once.

  A buffer is written again only by the next step's backward, which the graph
  lets begin after the update that reads it: that backward waits for the weights
  that the update wrote.
  """

  def __init__(
    self, layout: Layout, transport: str, grad_dtype: str, placement: Placement
  ):
    """Allocates the buffers.

    Args:
      layout: the model cut into buckets.
      transport: one of SINKS.
      grad_dtype: dtype of gradients on the wire.
      placement: the mesh, of one device.
    """
    self._sink = SINKS[transport]()
    self._buffers = {
      bucket.index: [
        WireBuffer(unit.shape, grad_dtype, placement) for unit in bucket.units
      ]
      for bucket in layout.buckets
      if bucket.trained and not bucket.on_device
    }
    self._grads = {
      bucket: [_read_only(buffer.view_inout) for buffer in buffers]
      for bucket, buffers in self._buffers.items()
    }
    self._routes = {}
    self._places: dict[int, range] = {}
    (device,) = placement.mesh.devices.flat
    for stage in range(layout.model.num_stages):
      buffers: list[WireBuffer] = []
      for bucket in layout.of_stage(stage):
        if bucket.index in self._buffers:
          first = len(buffers)
          buffers += self._buffers[bucket.index]
          self._places[bucket.index] = range(first, len(buffers))
      self._routes[stage] = self._sink.add_route(
        placement.device, {device: [buffer.view_inout for buffer in buffers]}
      )

  def grad_out(self, task: Task, step: Step) -> Wait:
    """Issues nothing: the stage's backward is on its way."""
    assert task.bucket is not None and task.stage is not None
    bucket = task.bucket
    route = self._routes[task.stage]

    def wait() -> None:
      self._sink.wait(route, self._places[bucket], ticket=step.number)
      step.host_grads[bucket] = self._grads[bucket]

    return wait

  def operand(self, stage: int) -> jax.Array | None:
    """Returns the operand of the stage's route."""
    return self._routes[stage].operand

  def interrupt(self, first_step: int) -> None:
    """Ends the waits of a step that has failed and of those after it."""
    self._sink.interrupt(first_step)

  def reset(self) -> None:
    """Forgets what programs of a failed step have delivered."""
    self._sink.reset()

  def close(self) -> None:
    """Ends all waits; programs that still deliver fail."""
    self._sink.close()


def _read_only(array: np.ndarray) -> np.ndarray:
  view = array.view()
  view.flags.writeable = False
  return view
