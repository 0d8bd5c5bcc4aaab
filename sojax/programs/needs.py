"""Which parameters a stage's programs really read."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from sojax.plan.network import Needs
from sojax.programs.manual import Ranks
from sojax.programs.spec import StageSpec, Targets
from sojax.programs.split_model import SplitModel
from sojax.programs.stages import StagePrograms, run_backward, run_forward
from sojax.programs.trace import StageShapes


def trace_needs(
  split: SplitModel,
  programs: Sequence[StagePrograms],
  shapes: Sequence[StageShapes],
) -> tuple[Needs, ...]:
  """Returns which leaves each stage's programs read, computing nothing.

  A backward that recomputes needs no weights whose product only the output is:
  what a program does not read, the compiler does not gather.

  Args:
    split: the model.
    programs: the programs of each stage.
    shapes: what goes into each stage and comes out.

  Returns:
    What each stage reads; nothing on one device, where nothing is gathered.
  """
  needs = []
  if programs[0].spec.ranks.alone:
    return ()
  for stage, program in enumerate(programs):
    used = split.used[stage]
    leaves = tuple(split.shape.leaves[leaf].shape for leaf in used)
    other = tuple(
      jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
      for leaf in split.other[stage]
    )
    places = _places(program.spec, leaves, other, shapes[stage])
    needs.append(Needs(*(frozenset(used[i] for i in read) for read in places)))
  return tuple(needs)


@functools.lru_cache
def _places(
  spec: StageSpec,
  leaf_shapes: tuple[tuple[int, ...], ...],
  other: tuple[jax.ShapeDtypeStruct, ...],
  shapes: StageShapes,
) -> tuple[frozenset[int], frozenset[int]]:
  """Returns the places of parameters that forward and backward read.

  The last stage has no forward.
  """
  alone = dataclasses.replace(
    spec, ranks=Ranks(1), gathered=None, transport="dma"
  )
  dtype = jnp.dtype(spec.working_dtype)
  params = [jax.ShapeDtypeStruct(shape, dtype) for shape in leaf_shapes]
  arguments = params, other, shapes.x
  scalar: Any = jax.ShapeDtypeStruct((), jnp.float32)
  dy: Any = shapes.y
  forward: frozenset[int] = frozenset()
  if spec.position.is_last:
    mask: Any = jax.ShapeDtypeStruct(shapes.targets, jnp.float32)
    tokens: Any = jax.ShapeDtypeStruct(shapes.targets, jnp.int32)
    dy = Targets(tokens, mask, scalar, scalar)
  else:
    traced = jax.make_jaxpr(functools.partial(run_forward, alone))(*arguments)
    forward = _read(traced.jaxpr, len(params))
  traced = jax.make_jaxpr(functools.partial(run_backward, alone, True))(
    *arguments, dy, {}, (), None
  )
  return forward, _read(traced.jaxpr, len(params))


def _read(jaxpr: core.Jaxpr, num_params: int) -> frozenset[int]:
  """Returns which of the first arguments the results depend on."""
  wanted = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
  for equation in reversed(jaxpr.eqns):
    if not wanted.isdisjoint(equation.outvars):
      wanted.update(
        v for v in equation.invars if not isinstance(v, core.Literal)
      )
  names = jaxpr.invars[:num_params]
  return frozenset(i for i, name in enumerate(names) if name in wanted)
