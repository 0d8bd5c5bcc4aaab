"""Gradients that backward delivers to the host while it runs."""

import jax
import numpy as np

from sojax.cluster.mesh import Placement
from sojax.graph.graph import Task
from sojax.host.sink import Route
from sojax.host.transports import SINKS
from sojax.host.wire import WireBuffer
from sojax.plan.buckets import Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan, WireDtypes
from sojax.runtime.executor import Wait
from sojax.runtime.gradients_out import GradientsOut
from sojax.runtime.step import Step


class CallbackOut(GradientsOut):
  """Waits for what backward puts into pinned buffers, allocated once.

  Before a buffer is written again it has been read. Backward of the next step
  waits for the weights of the update that reads the gradients; and if the host
  adds up micro-batches, backward of a later one waits for the sum that frees
  one of the `Plan.num_grads_on_host` buffers, which take turns.
  """

  def __init__(
    self, layout: Layout, plan: Plan, config: TrainConfig, placement: Placement
  ):
    """Allocates the buffers.

    Args:
      layout: the model cut into buckets.
      plan: names one of SINKS, and the side that adds up micro-batches.
      config: what is trained.
      placement: the mesh; of one device for "io_callback".
    """
    super().__init__(of_micro_batches=plan.accumulate == "host")
    num_stages = layout.model.num_stages
    self._sink = SINKS[plan.transport(num_stages)]()
    self._layout = layout
    self._placement = placement
    self._grad_dtype = WireDtypes.of(plan, config).grad
    self._num_turns = plan.num_grads_on_host(num_stages, config.accumulation)
    self._buffers: dict[tuple[int, int], list[WireBuffer]] = {}
    self._places: dict[int, range] = {}
    self._routes = {
      (stage, turn): self._add_route(stage, turn)
      for stage in range(num_stages)
      for turn in range(self._num_turns)
    }

  def grad_out(self, task: Task, step: Step) -> Wait:
    """Issues nothing: the stage's backward is on its way."""
    assert task.bucket is not None and task.stage is not None
    turn = task.micro % self._num_turns
    route = self._routes[task.stage, turn]
    places = self._places[task.bucket]
    buffers = self._buffers[task.bucket, turn]

    def wait() -> None:
      self._sink.wait(route, places, ticket=step.number)
      grads = [[*map(_read_only, b.shards_inout)] for b in buffers]
      self._hand_over(task, step, grads)

    return wait

  def operand(self, task: Task) -> jax.Array | None:
    """Returns the operand of the route of a stage and micro-batch."""
    assert task.stage is not None
    return self._routes[task.stage, task.micro % self._num_turns].operand

  def interrupt(self, first_step: int) -> None:
    """Ends the waits of a step that has failed and of those after it."""
    self._sink.interrupt(first_step)

  def reset(self) -> None:
    """Forgets what programs of a failed step have delivered."""
    self._sink.reset()

  def close(self) -> None:
    """Ends all waits; programs that still deliver fail."""
    self._sink.close()

  def _add_route(self, stage: int, turn: int) -> Route:
    """Allocates the buffers of a stage's host buckets, in their order."""
    in_order: list[WireBuffer] = []
    for bucket in self._layout.of_stage(stage):
      if not bucket.host_updates:
        continue
      buffers = [
        WireBuffer(unit.shape, self._grad_dtype, self._placement)
        for unit in bucket.units
      ]
      first = len(in_order)
      in_order += buffers
      self._places[bucket.index] = range(first, len(in_order))
      self._buffers[bucket.index, turn] = buffers
    destinations = {
      device: [buffer.shards_inout[number] for buffer in in_order]
      for number, device in enumerate(self._placement.mesh.devices.flat)
    }
    return self._sink.add_route(self._placement.units, destinations)


def _read_only(array: np.ndarray) -> np.ndarray:
  view = array.view()
  view.flags.writeable = False
  return view
