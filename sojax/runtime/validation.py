"""Validate: decides whether a step changes the state, and commits it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sojax.graph.graph import Task
from sojax.host.sums import GradientSums
from sojax.plan.adamw import AdamScalars, AdamW, adam_scalars
from sojax.programs.validate import make_keep_if_skipped, make_validate
from sojax.runtime.executor import Wait
from sojax.runtime.setup import Setup
from sojax.runtime.state import TrainState
from sojax.runtime.step import HostVerdict, Step


class Validation:
  """The validate task, and the scalars of the updates."""

  def __init__(
    self, setup: Setup, state: TrainState, sums: GradientSums | None
  ):
    """Prepares the program.

    Args:
      setup: gives the hyper-parameters, the clip norm and the loss scale.
      state: what is trained.
      sums: the sums of gradients on the host, if they are added up there.
    """
    self._state = state
    self._sums = sums
    config, placement = setup.config, setup.placement
    self._device = placement.device
    self._groups = setup.layout.model.groups
    self._config = config
    self._validate = make_validate(
      config.clip_norm, config.active_loss_scale, placement
    )
    self._keep_if_skipped = make_keep_if_skipped(placement)
    # Those since the last one that was finite: one that fails and is taken
    # again counts once.
    self._skipped: set[int] = set()
    self._scalars: tuple[int, tuple[AdamScalars, ...]] = (-1, ())

  def host_scalars(self, task: Task, step: Step) -> None:
    """Evaluates the schedules for a step.

    The previous step has ended its Validate: `count` is the one that this step
    updates from. The thread dispatches no other programs, behind which an
    evaluation would wait on the CPU.
    """
    del task
    step.scalars = self._scalars_at(self._state.count)

  def validate(self, task: Task, step: Step) -> Wait:
    """Issues the decision; its end commits or skips the step.

    The previous step has ended its own. What the host adds up is complete.
    """
    del task
    sumsqs = [step.sumsqs[stage] for stage in sorted(step.sumsqs)]
    on_host = None
    if self._sums is not None:
      on_host = jax.device_put(self._sums.sum_of_squares(), self._device)
    step.verdict, self._state.scale = self._validate(
      sumsqs, on_host, step.scale
    )
    for stage, old in enumerate(step.other_before):
      if old:
        self._state.other[stage] = self._keep_if_skipped(
          step.verdict.finite, old, step.other[stage]
        )
    return lambda: self._conclude(step)

  def unclipped(self, step: Step) -> float:
    """Returns the grad_scale of a step that is not clipped, to the bit.

    The previous step's Validate, which gives the loss scale, has ended.
    """
    if self._config.active_loss_scale is None:
      return 1.0
    return float(np.float32(1.0) / np.float32(_loss_scale(step)))

  def forget_skips(self) -> None:
    """Counts the steps that are skipped in a row from 0 again."""
    self._skipped.clear()

  def _conclude(self, step: Step) -> None:
    """Reads the verdict and commits the step, or counts that it is skipped."""
    assert step.verdict is not None
    verdict = HostVerdict(
      grad_scale=float(np.asarray(step.verdict.grad_scale)),
      finite=bool(np.asarray(step.verdict.finite)),
      norm=float(np.asarray(step.verdict.norm)),
      loss_scale=_loss_scale(step),
    )
    if verdict.finite:
      step.state_touched = True  # before the host thread sees the verdict
      step.host_verdict = verdict
      self._skipped.clear()
      self._state.count += 1
      return
    step.host_verdict = verdict
    self._skipped.add(step.number)
    num_skips = len(self._skipped)
    if num_skips >= self._config.max_consecutive_skips:
      raise FloatingPointError(
        f"gradients were not finite in {num_skips} steps in a row, which"
        f" max_consecutive_skips={self._config.max_consecutive_skips} allows no"
        " more; look at the data and the learning rate"
      )
    if self._config.active_loss_scale and verdict.loss_scale == 1.0:
      raise FloatingPointError(
        "gradients are not finite at loss scale 1; the model does not fit into"
        " fp16: use precision='bf16'"
      )

  def _scalars_at(self, count: int) -> tuple[AdamScalars, ...]:
    if self._scalars[0] != count:
      self._scalars = count, scalars_of_groups(self._groups, count)
    return self._scalars[1]


def scalars_of_groups(
  groups: Sequence[AdamW], count: int
) -> tuple[AdamScalars, ...]:
  """Evaluates the schedules, which are JAX code, on JAX's CPU backend.

  Args:
    groups: the hyper-parameters of each group.
    count: optimizer steps committed before this one.

  Raises:
    ValueError: if there is no such backend, or a schedule gives no finite
      number.
  """
  with jax.default_device(_cpu_device()):
    return tuple(adam_scalars(group, count) for group in groups)


def _loss_scale(step: Step) -> float:
  return float(np.asarray(step.scale.scale))


def _cpu_device() -> Any:
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError as error:
    raise ValueError(
      "schedules are evaluated on JAX's CPU backend, which is not there; add"
      " cpu to the platforms: JAX_PLATFORMS=cuda,cpu"
    ) from error
