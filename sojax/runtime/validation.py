"""Validate: decides whether a step changes the state, and commits it."""

from typing import Any

import jax
import numpy as np

from sojax.cluster.mesh import Placement
from sojax.graph.graph import Task
from sojax.host.sums import GradientSums
from sojax.plan.adamw import AdamScalars, AdamW, adam_scalars
from sojax.plan.config import TrainConfig
from sojax.programs.validate import make_keep_if_skipped, make_validate
from sojax.runtime.executor import Wait
from sojax.runtime.state import TrainState
from sojax.runtime.step import HostVerdict, Step


class Validation:
  """The validate task."""

  def __init__(
    self,
    state: TrainState,
    groups: tuple[AdamW, ...],
    config: TrainConfig,
    sums: GradientSums | None,
    placement: Placement,
  ):
    """Prepares the program.

    Args:
      state: what is trained.
      groups: the hyper-parameters of each group.
      config: gives the clip norm and the loss scale.
      sums: the sums of gradients on the host, if they are added up there.
      placement: the mesh.

    Raises:
      ValueError: if JAX has no CPU backend, or a schedule gives no finite
        number.
    """
    self._state = state
    self._sums = sums
    self._device = placement.device
    self._groups = groups
    self._config = config
    self._validate = make_validate(
      config.clip_norm, config.active_loss_scale, placement
    )
    self._keep_if_skipped = make_keep_if_skipped(placement)
    self._num_skips = 0
    self._cpu = _cpu_device()
    self._scalars: tuple[int, tuple[AdamScalars, ...]] = (-1, ())
    self._scalars_at(0)  # a schedule that cannot be evaluated fails early

  def validate(self, task: Task, step: Step) -> Wait:
    """Issues the decision; its end commits or skips the step.

    The previous step has ended its own: `count` is the one that this step
    updates from. What the host adds up is complete.
    """
    del task
    step.scalars = self._scalars_at(self._state.count)
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

  def _conclude(self, step: Step) -> None:
    """Reads the verdict and commits the step, or counts that it is skipped."""
    assert step.verdict is not None
    verdict = step.host_verdict = HostVerdict(
      grad_scale=float(np.asarray(step.verdict.grad_scale)),
      finite=bool(np.asarray(step.verdict.finite)),
      norm=float(np.asarray(step.verdict.norm)),
      loss_scale=float(np.asarray(step.scale.scale)),
    )
    if verdict.finite:
      self._num_skips = 0
      step.state_touched = True
      self._state.count += 1
      return
    self._num_skips += 1
    if self._num_skips >= self._config.max_consecutive_skips:
      raise FloatingPointError(
        f"gradients were not finite in {self._num_skips} steps in a row, which"
        f" max_consecutive_skips={self._config.max_consecutive_skips} allows no"
        " more; look at the data and the learning rate"
      )
    if self._config.active_loss_scale and verdict.loss_scale == 1.0:
      raise FloatingPointError(
        "gradients are not finite at loss scale 1; the model does not fit into"
        " fp16: use precision='bf16'"
      )

  def _scalars_at(self, count: int) -> tuple[AdamScalars, ...]:
    """Evaluates the schedules, which are JAX code, on the CPU backend."""
    if self._scalars[0] != count:
      with jax.default_device(self._cpu):
        scalars = tuple(adam_scalars(group, count) for group in self._groups)
      self._scalars = count, scalars
    return self._scalars[1]


def _cpu_device() -> Any:
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError as error:
    raise ValueError(
      "schedules are evaluated on JAX's CPU backend, which is not there; add"
      " cpu to the platforms: JAX_PLATFORMS=cuda,cpu"
    ) from error
