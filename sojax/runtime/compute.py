"""Dispatches forward and backward of the stages."""

from collections.abc import Sequence

import jax
import numpy as np

from sojax.graph.graph import Task
from sojax.runtime.executor import Wait
from sojax.runtime.gradients_out import GradientsOut
from sojax.runtime.setup import Setup
from sojax.runtime.speculation import NormSource
from sojax.runtime.step import MicroBatch, Step
from sojax.runtime.weights_in import Weights


class Compute:
  """Forward and backward tasks, and evaluation."""

  def __init__(
    self, setup: Setup, weights: Weights, gradients_out: GradientsOut
  ):
    """Remembers what to dispatch.

    Args:
      setup: the model and its programs.
      weights: the working weights.
      gradients_out: where the backwards' gradients go.
    """
    self._used = setup.split.used
    self._layout = setup.layout
    self._programs = setup.programs
    self._keep_programs = setup.keep_programs
    self._weights = weights
    self._gradients_out = gradients_out
    self._last = len(setup.programs) - 1

  def forward(self, task: Task, step: Step) -> Wait:
    """Issues a stage's forward; what backward needs stays in the step."""
    stage = _stage(task)
    x = _input(task, step)
    other = step.other[stage]
    params = self._weights.of_use(task, step)
    if stage in self._keep_programs:
      program = self._keep_programs[stage].forward
      y, step.other[stage], kept = program(params, other, x)
      step.kept[stage] = kept.with_held(other, x, y)
    else:
      y, step.other[stage] = self._programs[stage].forward(params, other, x)
      step.other_into[stage] = other
      if stage not in step.offloaded:
        step.inputs[stage] = x
    step.inputs[stage + 1] = y
    return lambda: _wait(y)

  def backward(self, task: Task, step: Step) -> Wait:
    """Issues a stage's backward; the last one's computes the loss, too."""
    stage = _stage(task)
    spec = self._programs[stage].spec
    last_micro = task.micro == len(step.batches) - 1
    if stage == self._last:
      dy = step.batches[task.micro].targets
      step.other_into[stage] = step.other[stage]
      step.inputs[stage] = _input(task, step)
    else:
      dy = step.grad
    if stage in self._keep_programs:
      programs = self._keep_programs[stage]
      left_by_forward = step.kept.pop(stage)
    else:
      programs = self._programs[stage]
      left_by_forward = (step.other_into.pop(stage), step.inputs.pop(stage))
    program = programs.finish if last_micro else programs.add
    # In one statement: an interrupt must not lose what tells of its end.
    step.newest_backward = out = program(
      self._weights.of_use(task, step),
      *left_by_forward,
      dy,
      self._from_borrowers(stage, step),
      step.partial.pop(stage, ()),
      self._gradients_out.operand(task),
    )
    step.newest_backward = out.sumsq
    step.grad = out.dx
    for place, grad in zip(spec.tied, out.tied, strict=True):
      step.tied.setdefault(self._used[stage][place], []).append(grad)
    if out.loss is not None:
      step.losses.append(out.loss)
      step.other[stage] = out.other
    if last_micro:
      step.sumsqs[stage] = out.sumsq
    else:
      step.partial[stage] = out.partial
    units = iter(out.units)
    for bucket in self._layout.of_stage(stage):
      sent = last_micro or bool(spec.num_sent and not bucket.on_device)
      returned = bucket.on_device or not spec.num_delivered
      if bucket.trained and sent and returned:
        step.units[bucket.index] = tuple(next(units) for _ in bucket.units)
    sumsq, speculation = out.sumsq, step.speculation
    if last_micro and speculation.wanted:
      sumsq.copy_to_host_async()  # ahead of the gradients on their way

    def wait() -> None:
      _wait(sumsq)
      if last_micro and speculation.wanted:
        speculation.watch.add(NormSource.STAGES, np.asarray(sumsq))

    return wait

  def evaluate(
    self, batches: Sequence[MicroBatch], other: Sequence[Sequence[jax.Array]]
  ) -> list[jax.Array]:
    """Returns the loss of each micro-batch, without dropout.

    All steps must have ended. Weights that flow are streamed in.
    """
    losses = []
    for batch in batches:
      x = batch.inputs
      for stage in range(self._last + 1):
        extra = (batch.targets,) if stage == self._last else ()
        params = self._weights.of_evaluation(stage, after=x)
        x = self._programs[stage].evaluate(params, other[stage], x, *extra)
      losses.append(x)
    return losses

  def _from_borrowers(
    self, stage: int, step: Step
  ) -> dict[int, list[jax.Array]]:
    return {
      place: step.tied.pop(leaf)
      for place, leaf in enumerate(self._used[stage])
      if leaf in step.tied and leaf not in self._layout.model.borrowed[stage]
    }


def _stage(task: Task) -> int:
  assert task.stage is not None
  return task.stage


def _input(task: Task, step: Step) -> jax.Array:
  """Takes the input of a stage that runs for the first time."""
  if task.stage == 0:
    return step.batches[task.micro].inputs
  return step.inputs.pop(_stage(task))


def _wait(array: jax.Array) -> None:
  array.block_until_ready()
