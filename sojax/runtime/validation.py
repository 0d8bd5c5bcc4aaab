"""Validate: decides whether a step changes the state, and commits it."""

from typing import Any

import jax
import numpy as np

from sojax.cluster.mesh import Placement
from sojax.graph.graph import Task
from sojax.plan.adamw import AdamScalars, AdamW, adam_scalars
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
    clip_norm: float | None,
    placement: Placement,
  ):
    self._state = state
    self._groups = groups
    self._validate = make_validate(clip_norm, placement)
    self._keep_if_skipped = make_keep_if_skipped(placement)
    self._cpu = _cpu_device()
    self._scalars: tuple[int, tuple[AdamScalars, ...]] = (-1, ())
    self._scalars_at(0)  # a schedule that cannot be evaluated fails early

  def validate(self, task: Task, step: Step) -> Wait:
    """Issues the decision; its end commits or skips the step.

    The previous step has ended its own: `count` is the one that this step
    updates from.
    """
    del task
    step.scalars = self._scalars_at(self._state.count)
    sumsqs = [step.sumsqs[stage] for stage in sorted(step.sumsqs)]
    verdict = step.verdict = self._validate(sumsqs)
    for stage, old in enumerate(step.other_before):
      if old:
        self._state.other[stage] = self._keep_if_skipped(
          verdict.finite, old, step.other[stage]
        )

    def wait() -> None:
      step.host_verdict = HostVerdict(
        grad_scale=float(np.asarray(verdict.grad_scale)),
        finite=bool(np.asarray(verdict.finite)),
        norm=float(np.asarray(verdict.norm)),
      )
      if step.host_verdict.finite:
        step.state_touched = True
        self._state.count += 1

    return wait

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
