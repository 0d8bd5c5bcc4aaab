"""Runs the stages abstractly: finds what does not fit before anything runs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from sojax.models.loss import loss_function
from sojax.programs.split_model import SplitModel


@dataclasses.dataclass(frozen=True)
class StageShapes:
  """What goes into a stage and what comes out, for one rank's micro-batch.

  Attributes:
    x: the input.
    y: the output; of the last stage the loss.
    targets: shape of the tokens to predict.
    backward_order: places of the parameters, in the order in which backward
      finishes their gradients: it reaches last what forward uses first.
  """

  x: jax.ShapeDtypeStruct
  y: jax.ShapeDtypeStruct
  targets: tuple[int, int]
  backward_order: tuple[int, ...]


def trace_stages(
  split: SplitModel, working_dtype: str, batch_shape: tuple[int, int]
) -> tuple[StageShapes, ...]:
  """Traces a step's forward without computing anything; equal stages once.

  Args:
    split: the model.
    working_dtype: dtype of parameters on the device.
    batch_shape: micro-batch and sequence length.

  Returns:
    The shapes of each stage; the last one's y is the loss.

  Raises:
    ValueError: if a stage returns something else than one floating-point array,
      or changes which other state it has, if the loss is no float32 scalar, or
      whatever the model itself objects to, such as a sequence too long for it.
  """
  leaves = [
    jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(working_dtype))
    for leaf in split.shape.leaves
  ]
  x = jax.ShapeDtypeStruct(batch_shape, jnp.int32)
  shapes = []
  known: dict[Any, tuple[Any, tuple[int, ...]]] = {}
  for stage, name in enumerate(split.shape.stage_names):
    params = [leaves[leaf] for leaf in split.used[stage]]
    last = stage == split.shape.num_stages - 1
    other = tuple((leaf.shape, leaf.dtype) for leaf in split.other[stage])
    key = split.parts[stage], tuple(params), other, x, last
    if key not in known:
      targets = batch_shape if last else None
      known[key] = _trace(split, stage, params, x, targets)
    y, order = known[key]
    if not isinstance(y, jax.ShapeDtypeStruct) or not jnp.issubdtype(
      y.dtype, jnp.floating
    ):
      raise ValueError(
        f"stage {name!r} returns {y}; it must return one floating-point array"
      )
    if last and (y.shape, y.dtype) != ((), jnp.float32):
      raise ValueError(
        f"the loss of stage {name!r} is {y.dtype} of shape {y.shape}; it must"
        " be a float32 scalar: the sum over positions of mask * loss"
      )
    shapes.append(StageShapes(x, y, batch_shape, order))
    x = y
  return tuple(shapes)


def backward_order(
  split: SplitModel, shapes: Sequence[StageShapes]
) -> tuple[int, ...]:
  """Returns all leaves; those of each stage as its backward finishes them."""
  return tuple(
    split.used[stage][place]
    for stage, shape in enumerate(shapes)
    for place in shape.backward_order
    if split.used[stage][place] not in split.shape.borrowed[stage]
  )


def _trace(
  split: SplitModel,
  stage: int,
  params: Sequence[Any],
  x: jax.ShapeDtypeStruct,
  targets_shape: tuple[int, int] | None,
) -> tuple[Any, tuple[int, ...]]:
  """Returns what the stage returns, and its `backward_order`."""
  name = split.shape.stage_names[stage]
  parts = split.parts[stage]

  def run(params, other, x, *targets):
    module = parts.merge(params, other)
    module.train()
    to_loss = loss_function(module, split.loss)
    y = to_loss(x, *targets) if targets else module(x)
    changed = not parts.has_state_of(module)
    if changed:
      raise ValueError(
        f"stage {name!r} changes which other state it has while it runs"
        " (nnx.sow, say); create all of its Variables in __init__"
      )
    return y

  targets = ()
  if targets_shape is not None:
    targets = (
      jax.ShapeDtypeStruct(targets_shape, jnp.int32),
      jax.ShapeDtypeStruct(targets_shape, jnp.float32),
    )
  traced, y = jax.make_jaxpr(run, return_shape=True)(
    params, split.other[stage], x, *targets
  )
  first_use: dict[Any, int] = {}
  for number, equation in enumerate(traced.jaxpr.eqns):
    for operand in equation.invars:
      if not isinstance(operand, core.Literal):
        first_use.setdefault(operand, number)
  names = traced.jaxpr.invars[: len(params)]
  places = sorted(
    range(len(params)), key=lambda place: -first_use.get(names[place], 0)
  )
  return y, tuple(places)
