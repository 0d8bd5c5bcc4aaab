"""Stages that keep their activations: backward applies what forward left.

jax.vjp's pull-back is a tree whose leaves, the residuals, are arrays that
forward had at hand. Forward returns those that it computed from the stage's
input or other state; where a residual is the input or the output itself, the
caller holds that array, and the program does not copy it. All other residuals
depend on parameters alone: the parameters themselves, transposed or widened
ones, masks. Backward has the parameters as well (in weight-flow they are
fetched again), so it makes those residuals anew; keeping them could take as
much as the weights.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from sojax.cluster.mesh import Placement
from sojax.plan.plan import Plan
from sojax.programs.deliver import deliver
from sojax.programs.manual import manual_jit
from sojax.programs.spec import BackwardOut, StageSpec
from sojax.programs.split_model import SplitModel
from sojax.programs.stages import StagePrograms, pull_back
from sojax.programs.trace import StageShapes

_X, _Y, _FIRST_ARRAY = range(3)


@dataclasses.dataclass(frozen=True)
class Residuals:
  """Where the residuals of a pull-back come from.

  Attributes:
    sources: for each residual, a place in (input, output, *arrays), or None if
      it depends on parameters alone.
    x: shape and dtype of the stage's input.
  """

  sources: tuple[int | None, ...]
  x: jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Kept:
  """What a stage's forward leaves for its backward.

  Attributes:
    residuals: what it consists of.
    arrays: the residuals that forward returned.
    other: the stage's other state as it went into forward.
    x: the stage's input, if it is a residual.
    y: the stage's output, if it is a residual.
  """

  residuals: Residuals
  arrays: tuple[jax.Array, ...]
  other: tuple[jax.Array, ...] = ()
  x: jax.Array | None = None
  y: jax.Array | None = None

  def holding(
    self, other: tuple[jax.Array, ...], x: jax.Array, y: jax.Array
  ) -> "Kept":
    """Returns it with what the caller holds, as far as backward needs it."""
    sources = self.residuals.sources
    return dataclasses.replace(
      self,
      other=other,
      x=x if _X in sources else None,
      y=y if _Y in sources else None,
    )


jax.tree_util.register_dataclass(
  Kept,
  data_fields=["arrays", "other", "x", "y"],
  meta_fields=["residuals"],
)


class KeepPrograms:
  """The jitted programs of a stage that keeps its activations.

  Attributes:
    spec: what they were made for.
    forward: (params, other, x) -> (y, new other, Kept).
    add: (params, Kept, dy, tied, partial, route) -> BackwardOut, as in
      StagePrograms.
    finish: the same for the last micro-batch.
  """

  def __init__(self, spec: StageSpec, placement: Placement):
    def jit(function: Callable[..., Any], donate: tuple[int, ...] = ()):
      return manual_jit(function, placement, donate=donate)

    self.spec = spec
    reused = (2,) if spec.reuses_dy else ()
    self.forward = jit(lambda *args: _forward(spec, *args))
    self.add = jit(lambda *args: _backward(spec, False, *args), (*reused, 4))
    self.finish = jit(lambda *args: _backward(spec, True, *args), reused)


def make_keep_programs(
  programs: Sequence[StagePrograms],
  plan: Plan,
  placement: Placement,
) -> dict[int, KeepPrograms]:
  """Returns the programs of the stages that keep activations, by stage.

  Args:
    programs: the programs of every stage.
    plan: says which stages keep their activations.
    placement: the mesh.

  Raises:
    ValueError: if the plan's activations are those of another number of stages.
  """
  return {
    stage: _programs(programs[stage].spec, placement)
    for stage, policy in enumerate(plan.activations_by_stage(len(programs)))
    if policy == "keep"
  }


def trace_kept_bytes(
  split: SplitModel,
  programs: Mapping[int, KeepPrograms],
  shapes: Sequence[StageShapes],
  working_dtype: str,
) -> dict[int, int]:
  """Returns the bytes that each stage's forward leaves, by stage.

  Args:
    split: the model.
    programs: the programs of the stages that keep their activations.
    shapes: what goes into each stage and comes out.
    working_dtype: dtype of parameters on the device.

  Returns:
    Bytes of the arrays that forward returns for backward, computing nothing.
  """
  dtype = jnp.dtype(working_dtype)
  num_bytes = {}
  for stage, program in programs.items():
    params = tuple(
      jax.ShapeDtypeStruct(split.shape.leaves[leaf].shape, dtype)
      for leaf in split.used[stage]
    )
    _, _, kept = jax.eval_shape(
      program.forward, params, split.other[stage], shapes[stage].x
    )
    num_bytes[stage] = sum(x.size * x.dtype.itemsize for x in kept.arrays)
  return num_bytes


@functools.lru_cache
def _programs(spec: StageSpec, placement: Placement) -> KeepPrograms:
  """Keeps programs, so that equal stages and equal models compile once."""
  return KeepPrograms(spec, placement)


def _forward(
  spec: StageSpec,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...], Kept]:
  def run(params, other, x):
    y, pull, new_other = pull_back(spec, params, other, x)
    return x, y, new_other, jax.tree.leaves(pull)

  args = params, other, x
  traced, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
  flat = core.jaxpr_as_fun(traced)(*jax.tree.leaves(args))
  _, y, new_other, leaves = jax.tree.unflatten(jax.tree.structure(shapes), flat)
  names = traced.jaxpr.outvars
  moving = _depending(traced.jaxpr, len(params))
  by_name = {names[0]: _X, names[1]: _Y}
  sources, arrays = [], []
  for name, leaf in zip(names[len(names) - len(leaves) :], leaves, strict=True):
    if isinstance(name, core.Literal) or name not in moving:
      sources.append(None)
      continue
    if name not in by_name:
      by_name[name] = _FIRST_ARRAY + len(arrays)
      arrays.append(leaf)
    sources.append(by_name[name])
  residuals = Residuals(tuple(sources), jax.ShapeDtypeStruct(x.shape, x.dtype))
  return y, new_other, Kept(residuals, tuple(arrays))


def _depending(jaxpr: core.Jaxpr, num_params: int) -> set[core.Var]:
  """Returns the variables that depend on more than the first arguments."""
  depending = set(jaxpr.invars[num_params:])
  for equation in jaxpr.eqns:
    operands = (v for v in equation.invars if not isinstance(v, core.Literal))
    if not depending.isdisjoint(operands):
      depending.update(equation.outvars)
  return depending


def _backward(
  spec: StageSpec,
  last_micro: bool,
  params: Sequence[jax.Array],
  kept: Kept,
  dy: jax.Array,
  tied: Mapping[int, Sequence[jax.Array]],
  partial: Sequence[jax.Array],
  route: jax.Array | None = None,
) -> BackwardOut:
  """Puts the pull-back together again and applies it.

  The stage is traced once more, on an input of zeros. Of that the program
  computes only the residuals that depend on parameters alone: nothing else is
  used, and the compiler leaves it out.
  """
  zeros = jnp.zeros(kept.residuals.x.shape, kept.residuals.x.dtype)
  _, pull, _ = pull_back(spec, params, kept.other, zeros)
  leaves, structure = jax.tree.flatten(pull)
  from_forward = (kept.x, kept.y, *kept.arrays)
  pull = jax.tree.unflatten(
    structure,
    [
      leaf if source is None else from_forward[source]
      for leaf, source in zip(leaves, kept.residuals.sources, strict=True)
    ],
  )
  grads, *dx = pull(dy)
  out = BackwardOut(
    sumsq=jnp.zeros((len(spec.trained),), jnp.float32),
    dx=dx[0] if dx else None,
  )
  return deliver(spec, last_micro, params, grads, out, tied, partial, route)
