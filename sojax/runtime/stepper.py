"""What a trainer is made of, and how it begins a step."""

from collections.abc import Sequence

from sojax.runtime.adaptive import Speculator
from sojax.runtime.executor import Executor
from sojax.runtime.parts import Parts
from sojax.runtime.run import StepRun
from sojax.runtime.setup import Setup
from sojax.runtime.step import MicroBatch, Step


class Stepper:
  """Takes training steps.

  Attributes:
    parts: what the tasks of a step work on.
    executor: runs them.
  """

  def __init__(self, setup: Setup):
    """Takes the memory that the plan's account names, and starts the threads.

    Args:
      setup: the model, and the way it is trained.

    Raises:
      ValueError: see `Parts`.
      OSError: see `Parts`.
    """
    num_stages = setup.layout.model.num_stages
    self._speculator = Speculator(
      setup.plan, setup.config, num_stages=num_stages
    )
    self.parts = Parts(setup)
    gradients_out = self.parts.gradients_out
    try:
      self.executor = Executor(
        setup.graph,
        self.parts.actions(),
        interrupt=gradients_out.interrupt,
        reset=gradients_out.reset,
      )
    except BaseException:
      self.parts.close()
      raise

  def step(self, batches: Sequence[MicroBatch]) -> StepRun:
    """Begins a step; returns when the caller has issued what is its own.

    Args:
      batches: one for each micro-batch, on the devices.

    Raises:
      StepError: if this step or an earlier one failed.
    """
    executor, state = self.executor, self.parts.state
    executor.raise_if_failed()
    step = Step(
      state.num_steps,
      batches,
      tuple(state.other),
      state.scale,
      self._speculator.begin(executor.times),
    )
    try:
      state.num_steps += 1
      return executor.run(step)
    except BaseException:  # an interrupt, perhaps before it was begun
      if not executor.has(step):
        state.num_steps = step.number
      raise

  def close(self) -> None:
    """Ends the threads, after the work under way; may be called again."""
    self.executor.close()
    self.parts.close()
