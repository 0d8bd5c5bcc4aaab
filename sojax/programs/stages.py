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
  """

  parts: StageParts
  position: Position
  trained: tuple[int, ...]
  tied: tuple[int, ...]
  units: tuple[UnitSpec, ...]
  grad_dtype: str


@dataclasses.dataclass(frozen=True)
class Targets:
  """What the last stage needs beside activations.

  Attributes:
    tokens: int32 [B, T], the tokens to predict.
    mask: float32 [B, T], weight of each position.
    scale: float32 scalar; the loss is this times the masked sum: one over the
      global batch's number of unmasked tokens.
  """

  tokens: jax.Array
  mask: jax.Array
  scale: jax.Array


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
      borrowers; `partial` is empty in the first micro-batch and donated. A
      middle stage's dy is donated.
    finish: the same for the last micro-batch.
  """

  def __init__(self, spec: StageSpec, placement: Placement):
    def jit(function: Callable[..., Any], donate: tuple[int, ...] = ()):
      return manual_jit(function, placement, donate=donate)

    self.spec = spec
    last = spec.position is Position.LAST
    reused = (3,) if spec.position is Position.MIDDLE else ()
    self.forward = jit(lambda *args: _forward(spec, *args))
    self.evaluate = jit(
      lambda *args: (_evaluate_loss if last else _evaluate)(spec, *args)
    )
    self.add = jit(lambda *args: _backward(spec, False, *args), (*reused, 5))
    self.finish = jit(lambda *args: _backward(spec, True, *args), reused)


def make_stage_programs(
  split: SplitModel, layout: Layout, grad_dtype: str, placement: Placement
) -> tuple[StagePrograms, ...]:
  """Returns the programs of every stage; equal stages share theirs."""
  specs = [
    _stage_spec(split, layout, stage, grad_dtype)
    for stage in range(layout.model.num_stages)
  ]
  return tuple(_programs(spec, placement) for spec in specs)


@functools.lru_cache
def _programs(spec: StageSpec, placement: Placement) -> StagePrograms:
  """Keeps programs, so that equal stages and equal models compile once."""
  return StagePrograms(spec, placement)


def stage_input_bytes(
  programs: Sequence[StagePrograms],
  split: SplitModel,
  working_dtype: str,
  batch_shape: tuple[int, int],
) -> list[int]:
  """Runs the stages abstractly; returns the bytes of each one's input.

  Args:
    programs: the programs of each stage.
    split: the model.
    working_dtype: dtype of parameters on the device.
    batch_shape: micro-batch and sequence length.

  Raises:
    ValueError: whatever the model objects to, such as a sequence that is too
      long for it.
  """
  leaves = [
    jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(working_dtype))
    for leaf in split.shape.leaves
  ]
  x = jax.ShapeDtypeStruct(batch_shape, jnp.int32)
  sizes = [x.size * x.dtype.itemsize]
  for stage in range(len(programs) - 1):
    used = [leaves[leaf] for leaf in split.used[stage]]
    x, _ = jax.eval_shape(programs[stage].forward, used, split.other[stage], x)
    sizes.append(x.size * x.dtype.itemsize)
  return sizes


def _stage_spec(
  split: SplitModel, layout: Layout, stage: int, grad_dtype: str
) -> StageSpec:
  model = layout.model
  used = split.used[stage]
  borrowed = set(model.borrowed[stage])
  places = [i for i, leaf in enumerate(used) if model.leaves[leaf].trained]
  buckets = [bucket for bucket in layout.of_stage(stage) if bucket.trained]
  ends = {0: Position.FIRST, model.num_stages - 1: Position.LAST}
  return StageSpec(
    parts=split.parts[stage],
    position=ends.get(stage, Position.MIDDLE),
    trained=tuple(i for i in places if used[i] not in borrowed),
    tied=tuple(i for i in places if used[i] in borrowed),
    units=unit_specs(buckets, used),
    grad_dtype=grad_dtype,
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
  places = spec.trained + spec.tied

  def run(wanted: Sequence[jax.Array], x: jax.Array):
    merged = list(params)
    for place, value in zip(places, wanted, strict=True):
      merged[place] = value
    module = spec.parts.merge(merged, other)
    module.train()
    if isinstance(dy, Targets):
      y = module.loss(x, dy.tokens, dy.mask)
    else:
      y = module(x)
    return y, spec.parts.other_of(module)

  wanted = tuple(params[place] for place in places)
  first = spec.position is Position.FIRST
  if first:
    y, pull, new_other = jax.vjp(lambda w: run(w, x), wanted, has_aux=True)
  else:
    y, pull, new_other = jax.vjp(run, wanted, x, has_aux=True)
  loss = None
  if isinstance(dy, Targets):
    loss = y * dy.scale
    dy = dy.scale.astype(y.dtype)
  pulled = pull(dy)
  grads, dx = (pulled[0], None) if first else pulled
  # Without it XLA fuses what follows into the computation of gradients, and
  # their bits would depend on what the wire carries and on how it is cut.
  grads = jax.lax.optimization_barrier(grads)
  num_own = len(spec.trained)
  sums = _add_up(spec, grads[:num_own], tied, partial)
  out = BackwardOut(
    sumsq=jnp.zeros((num_own,), jnp.float32),
    dx=dx,
    tied=grads[num_own:],
    loss=loss,
    other=() if loss is None else new_other,
  )
  if not last_micro:
    return dataclasses.replace(out, partial=sums)
  on_wire = [
    _round(total, params[place].dtype).astype(spec.grad_dtype)
    for place, total in zip(spec.trained, sums, strict=True)
  ]
  by_place: list[jax.Array | None] = [None] * len(params)
  for place, grad in zip(spec.trained, on_wire, strict=True):
    by_place[place] = grad
  return dataclasses.replace(
    out, units=to_units(by_place, spec.units), sumsq=_sums_of_squares(on_wire)
  )


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

  reduce_precision, since XLA may leave out a cast that is widened again.
  """
  if dtype == jnp.bfloat16:
    total = jax.lax.reduce_precision(total, exponent_bits=8, mantissa_bits=7)
  return total.astype(dtype)


def _sums_of_squares(grads: Sequence[jax.Array]) -> jax.Array:
  if not grads:
    return jnp.zeros((0,), jnp.float32)
  return jnp.stack(
    [jnp.sum(jnp.square(grad.astype(jnp.float32))) for grad in grads]
  )
