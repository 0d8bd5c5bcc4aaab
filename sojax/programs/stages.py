"""Forward and backward of a stage, each one jitted program.

Backward recomputes the stage from its input and its other state as they were in
forward, differentiates its parameters, and returns their gradients as wire
units. Stages with equal specs share their compiled programs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from sojax.cluster.mesh import Placement
from sojax.models.loss import loss_function
from sojax.plan.buckets import Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan, WireDtypes
from sojax.programs.deliver import deliver
from sojax.programs.flatten import unit_specs
from sojax.programs.manual import ROWS, SHARDS, WHOLE, Ranks, manual_jit
from sojax.programs.spec import (
  BACKWARD_OUT_SPECS,
  TARGETS_SPECS,
  BackwardOut,
  Gathered,
  Position,
  StageSpec,
  Targets,
)
from sojax.programs.split_model import SplitModel
from sojax.programs.trace import StageShapes
from sojax.programs.zero import parameters, state_of_all, state_of_rank


class StagePrograms:
  """The jitted programs of a stage.

  `params` are the stage's parameters, on several devices the shards that they
  are gathered from.

  Attributes:
    spec: what they were made for.
    forward: (params, other, x) -> (y, new other).
    evaluate: (params, other, x) -> y, without dropout; in the last stage
      (params, other, x, Targets) -> loss.
    add: (params, other, x, dy or Targets, tied, partial, route) ->
      BackwardOut, for all micro-batches but the last. `tied` maps places to
      gradients from borrowers; `partial`, of the micro-batch before, is empty
      in the first one and donated. So is dy if the spec says so. `route` is the
      operand of the route of the units that leave, None if none do.
    finish: the same for the last micro-batch.
  """

  def __init__(self, spec: StageSpec, placement: Placement):
    self.spec = spec
    last = spec.position.is_last
    inputs = SHARDS, WHOLE, ROWS
    self.forward = manual_jit(
      lambda *args: run_forward(spec, *args),
      placement,
      in_specs=inputs,
      out_specs=(ROWS, WHOLE),
    )
    self.evaluate = manual_jit(
      lambda *args: (_evaluate_loss if last else _evaluate)(spec, *args),
      placement,
      in_specs=(*inputs, TARGETS_SPECS) if last else inputs,
      out_specs=WHOLE if last else ROWS,
    )
    reused = (3,) if spec.reuses_dy else ()
    dy = TARGETS_SPECS if last else ROWS
    self.add, self.finish = (
      manual_jit(
        functools.partial(run_backward, spec, last_micro),
        placement,
        in_specs=(*inputs, dy, SHARDS, SHARDS, SHARDS),
        out_specs=BACKWARD_OUT_SPECS,
        donate=reused if last_micro else (*reused, 5),
      )
      for last_micro in (False, True)
    )


def make_stage_programs(
  split: SplitModel,
  layout: Layout,
  shapes: Sequence[StageShapes],
  plan: Plan,
  config: TrainConfig,
  placement: Placement,
) -> tuple[StagePrograms, ...]:
  """Returns the programs of every stage; equal stages share theirs.

  Args:
    split: the model.
    layout: how it is cut into buckets.
    shapes: what goes into each stage and comes out.
    plan: how a step is carried out.
    config: what is trained; gives the precision.
    placement: the mesh.
  """
  grad_dtype = WireDtypes.of(plan, config).grad
  return tuple(
    _programs(
      StageSpec(
        **_of_layout(split, layout, stage, plan),
        reuses_dy=0 < stage < len(shapes) - 1 and x_and_y.x == x_and_y.y,
        grad_dtype=grad_dtype,
        working_dtype=config.working_dtype,
      ),
      placement,
    )
    for stage, x_and_y in enumerate(shapes)
  )


@functools.lru_cache
def _programs(spec: StageSpec, placement: Placement) -> StagePrograms:
  """Keeps programs, so that equal stages and equal models compile once."""
  return StagePrograms(spec, placement)


def _of_layout(
  split: SplitModel, layout: Layout, stage: int, plan: Plan
) -> dict[str, Any]:
  """Returns the fields of a StageSpec that depend on how the model is cut."""
  model = layout.model
  used = split.used[stage]
  borrowed = set(model.borrowed[stage])
  places = [i for i, leaf in enumerate(used) if model.leaves[leaf].trained]
  buckets = [bucket for bucket in layout.of_stage(stage) if bucket.trained]
  assert buckets == sorted(buckets, key=lambda bucket: bucket.on_device)
  position = Position.of(stage, model.num_stages)
  gathered = None
  if layout.num_shards > 1:
    units = [b.units[number] for b, number in layout.units_used_by(stage)]
    shapes = tuple(model.leaves[leaf].shape for leaf in used)
    gathered = Gathered(unit_specs(units, used), shapes)
  return dict(
    parts=split.parts[stage],
    position=position,
    loss=split.loss if position.is_last else None,
    trained=tuple(i for i in places if used[i] not in borrowed),
    tied=tuple(i for i in places if used[i] in borrowed),
    units=unit_specs([u for b in buckets for u in b.units], used),
    num_on_host=sum(len(b.units) for b in buckets if not b.on_device),
    accumulate=plan.accumulate,
    transport=plan.transport(model.num_stages),
    ranks=Ranks(layout.num_shards),
    gathered=gathered,
  )


def run_forward(
  spec: StageSpec,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """Runs a stage; see StagePrograms.forward."""
  of_rank = state_of_rank(spec.ranks, other)
  module = spec.parts.merge(parameters(spec, params), of_rank)
  module.train()
  y = module(x)
  new = spec.parts.other_of(module)
  return y, state_of_all(spec.ranks, other, of_rank, new)


def _evaluate(
  spec: StageSpec,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
) -> jax.Array:
  module = spec.parts.merge(parameters(spec, params), other)
  module.eval()
  return module(x)


def _evaluate_loss(
  spec: StageSpec,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
  targets: Targets,
) -> jax.Array:
  module = spec.parts.merge(parameters(spec, params), other)
  module.eval()
  loss = loss_function(module, spec.loss)
  return spec.ranks.sum(loss(x, targets.tokens, targets.mask) * targets.scale)


def run_backward(
  spec: StageSpec,
  last_micro: bool,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
  dy: jax.Array | Targets,
  tied: Mapping[int, Sequence[jax.Array]],
  partial: Sequence[jax.Array],
  route: jax.Array | None,
) -> BackwardOut:
  """Runs a stage forward and backward; see StagePrograms.add."""
  targets = dy if isinstance(dy, Targets) else None
  params = parameters(spec, params)
  y, pull, new_other = pull_back(spec, params, other, x, targets)
  loss = None
  if isinstance(dy, Targets):
    loss = spec.ranks.sum(y * dy.scale)
    dy = (dy.scale * dy.loss_scale).astype(y.dtype)
  grads, *dx = pull(dy)
  return dataclasses.replace(
    deliver(spec, last_micro, grads, tied, partial, route),
    dx=dx[0] if dx else None,
    loss=loss,
    other=() if loss is None else new_other,
  )


def pull_back(
  spec: StageSpec,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
  targets: Targets | None = None,
) -> tuple[jax.Array, Callable[..., Any], tuple[jax.Array, ...]]:
  """Runs a stage forward and differentiates it.

  Args:
    spec: the stage.
    params: its parameters.
    other: its other state.
    x: its input.
    targets: in the last stage, what to predict.

  Returns:
    The output (in the last stage the loss, not scaled), the pull-back, as
    jax.vjp gives it, and the new other state. The pull-back maps the output's
    gradient to those of `spec.trained` and `spec.tied`, in one tuple, and
    then, unless the input is tokens, the input's.
  """
  places = spec.trained + spec.tied

  def run(wanted: Sequence[jax.Array], x: jax.Array):
    merged = list(params)
    for place, value in zip(places, wanted, strict=True):
      merged[place] = value
    of_rank = state_of_rank(spec.ranks, other)
    module = spec.parts.merge(merged, of_rank)
    module.train()
    if targets is not None:
      loss = loss_function(module, spec.loss)
      y = loss(x, targets.tokens, targets.mask)
    else:
      y = module(x)
    new = spec.parts.other_of(module)
    return y, state_of_all(spec.ranks, other, of_rank, new)

  wanted = tuple(params[place] for place in places)
  first = spec.position.is_first
  differentiated = (lambda w: run(w, x)) if first else run
  inputs = (wanted,) if first else (wanted, x)
  return jax.vjp(differentiated, *inputs, has_aux=True)
