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
import jax.numpy as jnp

from sojax.cluster.mesh import Placement
from sojax.models.loss import loss_function
from sojax.plan.buckets import Layout
from sojax.programs.deliver import deliver
from sojax.programs.flatten import unit_specs
from sojax.programs.manual import manual_jit
from sojax.programs.spec import BackwardOut, Position, StageSpec, Targets
from sojax.programs.split_model import SplitModel
from sojax.programs.trace import StageShapes


class StagePrograms:
  """The jitted programs of a stage.

  Attributes:
    spec: what they were made for.
    forward: (params, other, x) -> (y, new other).
    evaluate: (params, other, x) -> y, without dropout; in the last stage
      (params, other, x, Targets) -> loss.
    add: (params, other, x, dy or Targets, tied, partial) -> BackwardOut, for
      all micro-batches but the last. `tied` maps places to gradients from
      borrowers; `partial`, of the micro-batch before, is empty in the first one
      and donated. So is dy if the spec says so.
    finish: the same for the last micro-batch.
  """

  def __init__(self, spec: StageSpec, placement: Placement):
    def jit(function: Callable[..., Any], donate: tuple[int, ...] = ()):
      return manual_jit(function, placement, donate=donate)

    self.spec = spec
    last = spec.position.is_last
    reused = (3,) if spec.reuses_dy else ()
    self.forward = jit(lambda *args: _forward(spec, *args))
    self.evaluate = jit(
      lambda *args: (_evaluate_loss if last else _evaluate)(spec, *args)
    )
    self.add = jit(lambda *args: _backward(spec, False, *args), (*reused, 5))
    self.finish = jit(lambda *args: _backward(spec, True, *args), reused)


def make_stage_programs(
  split: SplitModel,
  layout: Layout,
  shapes: Sequence[StageShapes],
  grad_dtype: str,
  accumulate: str,
  placement: Placement,
) -> tuple[StagePrograms, ...]:
  """Returns the programs of every stage; equal stages share theirs.

  Args:
    split: the model.
    layout: how it is cut into buckets.
    shapes: what goes into each stage and comes out.
    grad_dtype: dtype of gradients on the wire.
    accumulate: the side that adds up micro-batches, as `Plan.accumulate`.
    placement: the mesh.
  """
  return tuple(
    _programs(
      _stage_spec(split, layout, stage, shapes[stage], grad_dtype, accumulate),
      placement,
    )
    for stage in range(layout.model.num_stages)
  )


@functools.lru_cache
def _programs(spec: StageSpec, placement: Placement) -> StagePrograms:
  """Keeps programs, so that equal stages and equal models compile once."""
  return StagePrograms(spec, placement)


def _stage_spec(
  split: SplitModel,
  layout: Layout,
  stage: int,
  shapes: StageShapes,
  grad_dtype: str,
  accumulate: str,
) -> StageSpec:
  model = layout.model
  used = split.used[stage]
  borrowed = set(model.borrowed[stage])
  places = [i for i, leaf in enumerate(used) if model.leaves[leaf].trained]
  buckets = [bucket for bucket in layout.of_stage(stage) if bucket.trained]
  assert buckets == sorted(buckets, key=lambda bucket: bucket.on_device)
  num_sent = sum(len(b.units) for b in buckets if not b.on_device)
  position = Position.of(stage, model.num_stages)
  return StageSpec(
    parts=split.parts[stage],
    position=position,
    loss=split.loss if position.is_last else None,
    trained=tuple(i for i in places if used[i] not in borrowed),
    tied=tuple(i for i in places if used[i] in borrowed),
    units=unit_specs(buckets, used),
    num_sent=num_sent if accumulate == "host" else None,
    grad_dtype=grad_dtype,
    reuses_dy=position is Position.MIDDLE and shapes.x == shapes.y,
  )


def _forward(
  spec: StageSpec,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  module = spec.parts.merge(params, other)
  module.train()
  y = module(x)
  return y, spec.parts.other_of(module)


def _evaluate(
  spec: StageSpec,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
) -> jax.Array:
  module = spec.parts.merge(params, other)
  module.eval()
  return module(x)


def _evaluate_loss(
  spec: StageSpec,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
  targets: Targets,
) -> jax.Array:
  module = spec.parts.merge(params, other)
  module.eval()
  loss = loss_function(module, spec.loss)
  return loss(x, targets.tokens, targets.mask) * targets.scale


def _backward(
  spec: StageSpec,
  last_micro: bool,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
  dy: jax.Array | Targets,
  tied: Mapping[int, Sequence[jax.Array]],
  partial: Sequence[jax.Array],
) -> BackwardOut:
  grads, out = _differentiate(spec, params, other, x, dy)
  return deliver(spec, last_micro, params, grads, out, tied, partial)


def _differentiate(
  spec: StageSpec,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
  dy: jax.Array | Targets,
) -> tuple[tuple[jax.Array, ...], BackwardOut]:
  """Returns gradients of `spec.trained` and `spec.tied`, and the rest."""
  targets = dy if isinstance(dy, Targets) else None
  y, pull, new_other = pull_back(spec, params, other, x, targets)
  out = BackwardOut(sumsq=jnp.zeros((len(spec.trained),), jnp.float32))
  if isinstance(dy, Targets):
    out = dataclasses.replace(out, loss=y * dy.scale, other=new_other)
    dy = (dy.scale * dy.loss_scale).astype(y.dtype)
  grads, *dx = pull(dy)
  return grads, dataclasses.replace(out, dx=dx[0] if dx else None)


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
    module = spec.parts.merge(merged, other)
    module.train()
    if targets is not None:
      loss = loss_function(module, spec.loss)
      y = loss(x, targets.tokens, targets.mask)
    else:
      y = module(x)
    return y, spec.parts.other_of(module)

  wanted = tuple(params[place] for place in places)
  first = spec.position.is_first
  differentiated = (lambda w: run(w, x)) if first else run
  inputs = (wanted,) if first else (wanted, x)
  return jax.vjp(differentiated, *inputs, has_aux=True)
