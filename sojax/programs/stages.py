"""Forward and backward of a stage, each one jitted program.

Backward recomputes the stage from its input and its other state as they were in
forward, differentiates its parameters, and returns their gradients as wire
units. Stages with equal specs share their compiled programs.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sojax.cluster.mesh import Placement
from sojax.plan.buckets import Layout
from sojax.programs.flatten import UnitSpec, to_units, unit_specs
from sojax.programs.manual import manual_jit
from sojax.programs.split_model import SplitModel, StageParts
from sojax.programs.trace import StageShapes


class Position(enum.Enum):
  """Where a stage stands; it decides what goes in and comes out."""

  FIRST = "first"  # takes tokens, gives activations
  MIDDLE = "middle"  # takes and gives activations
  LAST = "last"  # takes activations, gives the loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSpec:
  """Everything that shapes a stage's programs.

  Attributes:
    parts: how to put the module together.
    position: where the stage stands.
    trained: places of the trained parameters that the stage owns.
    tied: places of the trained parameters that it borrows.
    units: the wire units of its gradients.
    grad_dtype: dtype of gradients on the wire.
    reuses_dy: whether the input's gradient can take the place of the output's.
  """

  parts: StageParts
  position: Position
  trained: tuple[int, ...]
  tied: tuple[int, ...]
  units: tuple[UnitSpec, ...]
  grad_dtype: str
  reuses_dy: bool


@dataclasses.dataclass(frozen=True)
class Targets:
  """What the last stage needs beside activations.

  Attributes:
    tokens: int32 [B, T], the tokens to predict.
    mask: float32 [B, T], weight of each position.
    scale: float32 scalar; the loss is this times the masked sum: one over the
      global batch's number of unmasked tokens.
    loss_scale: float32 scalar; gradients are those of this times the loss.
  """

  tokens: jax.Array
  mask: jax.Array
  scale: jax.Array
  loss_scale: jax.Array


jax.tree_util.register_dataclass(Targets)


@dataclasses.dataclass(frozen=True)
class BackwardOut:
  """What a backward program returns; unused fields are empty.

  Attributes:
    dx: gradient of the stage's input.
    tied: gradients of borrowed parameters, in the order of `StageSpec.tied`.
    partial: float32 sums of gradients over the micro-batches so far, in the
      order of `StageSpec.trained`; from all micro-batches but the last.
    units: gradients as wire units; from the last micro-batch.
    sumsq: float32 [len(trained)], sum of squares of each parameter's gradient
      as it crosses the wire; zeros from all micro-batches but the last. It is
      never donated, so it tells when the program has ended.
    loss: float32 scalar, from the last stage.
    other: the stage's new other state, from the last stage.
  """

  sumsq: jax.Array
  dx: jax.Array | None = None
  tied: tuple[jax.Array, ...] = ()
  partial: tuple[jax.Array, ...] = ()
  units: tuple[jax.Array, ...] = ()
  loss: jax.Array | None = None
  other: tuple[jax.Array, ...] = ()


jax.tree_util.register_dataclass(BackwardOut)


class StagePrograms:
  """The jitted programs of a stage.

  Attributes:
    spec: what they were made for.
    forward: (params, other, x) -> (y, new other).
    evaluate: (params, other, x) -> y, without dropout; in the last stage
      (params, other, x, Targets) -> loss.
    add: (params, other, x, dy or Targets, tied, partial) -> BackwardOut, for
      all micro-batches but the last. `tied` maps places to gradients from
      borrowers; `partial` is empty in the first micro-batch and donated. So
      is dy if the spec says so.
    finish: the same for the last micro-batch.
  """

  def __init__(self, spec: StageSpec, placement: Placement):
    def jit(function: Callable[..., Any], donate: tuple[int, ...] = ()):
      return manual_jit(function, placement, donate=donate)

    self.spec = spec
    last = spec.position is Position.LAST
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
  placement: Placement,
) -> tuple[StagePrograms, ...]:
  """Returns the programs of every stage; equal stages share theirs.

  Args:
    split: the model.
    layout: how it is cut into buckets.
    shapes: what goes into each stage and comes out.
    grad_dtype: dtype of gradients on the wire.
    placement: the mesh.
  """
  return tuple(
    _programs(
      _stage_spec(split, layout, stage, shapes[stage], grad_dtype), placement
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
) -> StageSpec:
  model = layout.model
  used = split.used[stage]
  borrowed = set(model.borrowed[stage])
  places = [i for i, leaf in enumerate(used) if model.leaves[leaf].trained]
  buckets = [bucket for bucket in layout.of_stage(stage) if bucket.trained]
  ends = {0: Position.FIRST, model.num_stages - 1: Position.LAST}
  position = ends.get(stage, Position.MIDDLE)
  return StageSpec(
    parts=split.parts[stage],
    position=position,
    trained=tuple(i for i in places if used[i] not in borrowed),
    tied=tuple(i for i in places if used[i] in borrowed),
    units=unit_specs(buckets, used),
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
  return module.loss(x, targets.tokens, targets.mask) * targets.scale


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


def deliver(
  spec: StageSpec,
  last_micro: bool,
  params: Sequence[jax.Array],
  grads: Sequence[jax.Array],
  out: BackwardOut,
  tied: Mapping[int, Sequence[jax.Array]],
  partial: Sequence[jax.Array],
) -> BackwardOut:
  """Adds to what a backward returns what becomes of its gradients.

  Args:
    spec: the stage.
    last_micro: whether the gradients are complete.
    params: the stage's parameters.
    grads: gradients of `spec.trained` and `spec.tied`.
    out: what else the backward returns.
    tied: gradients from borrowers, by place.
    partial: float32 sums over the micro-batches so far.
  """
  # Without it XLA fuses what follows into the computation of gradients, and
  # their bits would depend on what the wire carries and on how it is cut.
  grads = jax.lax.optimization_barrier(grads)
  num_own = len(spec.trained)
  sums = _add_up(spec, grads[:num_own], tied, partial)
  out = dataclasses.replace(out, tied=grads[num_own:])
  if not last_micro:
    return dataclasses.replace(out, partial=sums)
  by_place: list[jax.Array | None] = [None] * len(params)
  for place, total in zip(spec.trained, sums, strict=True):
    rounded = _round(total, params[place].dtype)
    by_place[place] = rounded.astype(spec.grad_dtype)
  on_wire = [grad for grad in by_place if grad is not None]
  return dataclasses.replace(
    out, units=to_units(by_place, spec.units), sumsq=_sums_of_squares(on_wire)
  )


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
  first = spec.position is Position.FIRST
  return grads, dataclasses.replace(out, dx=None if first else dx[0])


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
    then, except in the first stage, the input's.
  """
  places = spec.trained + spec.tied

  def run(wanted: Sequence[jax.Array], x: jax.Array):
    merged = list(params)
    for place, value in zip(places, wanted, strict=True):
      merged[place] = value
    module = spec.parts.merge(merged, other)
    module.train()
    if targets is not None:
      y = module.loss(x, targets.tokens, targets.mask)
    else:
      y = module(x)
    return y, spec.parts.other_of(module)

  wanted = tuple(params[place] for place in places)
  first = spec.position is Position.FIRST
  differentiated = (lambda w: run(w, x)) if first else run
  inputs = (wanted,) if first else (wanted, x)
  return jax.vjp(differentiated, *inputs, has_aux=True)


def _add_up(
  spec: StageSpec,
  grads: Sequence[jax.Array],
  tied: Mapping[int, Sequence[jax.Array]],
  partial: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
  """Adds borrowers' gradients and earlier micro-batches', in float32."""
  sums = []
  for number, (place, grad) in enumerate(zip(spec.trained, grads, strict=True)):
    total = grad.astype(jnp.float32)
    for borrowed in tied.get(place, ()):
      total = total + borrowed.astype(jnp.float32)
    if partial:
      total = partial[number] + total
    sums.append(total)
  return tuple(sums)


def _round(total: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Rounds float32 sums to the working dtype, whatever the wire carries.

  The barrier, since XLA may leave out a cast that is widened again.
  """
  return jax.lax.optimization_barrier(total.astype(dtype))


def _sums_of_squares(grads: Sequence[jax.Array]) -> jax.Array:
  if not grads:
    return jnp.zeros((0,), jnp.float32)
  return jnp.stack(
    [jnp.sum(jnp.square(grad.astype(jnp.float32))) for grad in grads]
  )
