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
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend import core

from sojax.cluster.mesh import Placement
from sojax.plan.plan import Plan
from sojax.programs.deliver import deliver
from sojax.programs.manual import ROWS, SHARDS, WHOLE, manual_jit
from sojax.programs.spec import BACKWARD_OUT_SPECS, BackwardOut, StageSpec
from sojax.programs.stages import StagePrograms, pull_back
from sojax.programs.zero import parameters

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
  """What a stage's forward returns for its backward.

  Attributes:
    residuals: what the pull-back consists of.
    arrays: the residuals that forward computed; of several ranks stacked.
  """

  residuals: Residuals
  arrays: tuple[jax.Array, ...]

  def with_held(
    self, other: tuple[jax.Array, ...], x: jax.Array, y: jax.Array
  ) -> "Left":
    """Adds what the caller holds, as far as backward needs it."""
    sources = self.residuals.sources
    return (
      self,
      other,
      x if _X in sources else None,
      y if _Y in sources else None,
    )


jax.tree_util.register_dataclass(
  Kept, data_fields=["arrays"], meta_fields=["residuals"]
)

Left = tuple[Kept, tuple[jax.Array, ...], jax.Array | None, jax.Array | None]
"""All that backward needs from forward: what it returned; other state as it
went in; the input and the output, if they are residuals."""


class KeepPrograms:
  """The jitted programs of a stage that keeps its activations.

  Attributes:
    spec: what they were made for.
    forward: (params, other, x) -> (y, new other, Kept).
    add: (params, *Left, dy, tied, partial, route) -> BackwardOut, as in
      StagePrograms.
    finish: the same for the last micro-batch.
  """

  def __init__(self, spec: StageSpec, placement: Placement):
    self.spec = spec
    self.forward = manual_jit(
      lambda *args: run_forward_keeping(spec, *args),
      placement,
      in_specs=(SHARDS, WHOLE, ROWS),
      out_specs=(ROWS, WHOLE, SHARDS),
    )
    left = SHARDS, WHOLE, ROWS, ROWS
    reused = (5,) if spec.reuses_dy else ()
    self.add, self.finish = (
      manual_jit(
        functools.partial(_backward, spec, last_micro),
        placement,
        in_specs=(SHARDS, *left, ROWS, SHARDS, SHARDS, SHARDS),
        out_specs=BACKWARD_OUT_SPECS,
        donate=reused if last_micro else (*reused, 7),
      )
      for last_micro in (False, True)
    )


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


@functools.lru_cache
def _programs(spec: StageSpec, placement: Placement) -> KeepPrograms:
  """Keeps programs, so that equal stages and equal models compile once."""
  return KeepPrograms(spec, placement)


def run_forward_keeping(
  spec: StageSpec,
  params: Sequence[jax.Array],
  other: Sequence[jax.Array],
  x: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...], Kept]:
  """Runs a stage and keeps its residuals; see KeepPrograms.forward."""

  def run(params, other, x):
    y, pull, new_other = pull_back(spec, parameters(spec, params), other, x)
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
      arrays.append(spec.ranks.stack(leaf))
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
  other: Sequence[jax.Array],
  x: jax.Array | None,
  y: jax.Array | None,
  dy: jax.Array,
  tied: Mapping[int, Sequence[jax.Array]],
  partial: Sequence[jax.Array],
  route: jax.Array | None,
) -> BackwardOut:
  """Puts the pull-back together again and applies it.

  The stage is traced once more, on an input of zeros. Of that the program
  computes only the residuals that depend on parameters alone: nothing else is
  used, and the compiler leaves it out.
  """
  zeros = jnp.zeros(kept.residuals.x.shape, kept.residuals.x.dtype)
  _, pull, _ = pull_back(spec, parameters(spec, params), other, zeros)
  leaves, structure = jax.tree.flatten(pull)
  from_forward = (x, y, *map(spec.ranks.unstack, kept.arrays))
  pull = jax.tree.unflatten(
    structure,
    [
      leaf if source is None else from_forward[source]
      for leaf, source in zip(leaves, kept.residuals.sources, strict=True)
    ],
  )
  grads, *dx = pull(dy)
  return dataclasses.replace(
    deliver(spec, last_micro, grads, tied, partial, route),
    dx=dx[0] if dx else None,
  )
