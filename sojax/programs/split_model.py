"""Takes a Flax model apart into stages, parameters and other state."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from sojax.models.stage import Stage, stages_of
from sojax.plan.adamw import AdamW, Optimizer, Partition
from sojax.plan.buckets import Leaf, ModelShape


@dataclasses.dataclass(frozen=True)
class StageParts:
  """How a stage's module is put together again inside a program.

  Equal for equal blocks, so that one compiled program serves them all.

  Attributes:
    graphdef: the module's static structure.
    params_def: tree structure of its parameters.
    other_def: tree structure of its other state.
  """

  graphdef: nnx.GraphDef
  params_def: Any
  other_def: Any

  def merge(self, params: Sequence[Any], other: Sequence[Any]) -> Any:
    """Returns the module that holds these leaves."""
    return nnx.merge(
      self.graphdef,
      jax.tree.unflatten(self.params_def, params),
      jax.tree.unflatten(self.other_def, other),
    )

  def has_state_of(self, module: Any) -> bool:
    """Says whether a module's other state is still that of `merge`."""
    _, _, rest = nnx.split(module, nnx.Param, ...)
    return jax.tree.structure(rest) == self.other_def

  def other_of(self, module: Any) -> tuple[Any, ...]:
    """Returns the module's other state, as `merge` takes it."""
    _, _, rest = nnx.split(module, nnx.Param, ...)
    return tuple(jax.tree.leaves(rest))


@dataclasses.dataclass(frozen=True)
class SplitModel:
  """A model taken apart.

  Attributes:
    shape: leaves, stages and groups, as the planner sees them.
    modules: the model's own module of each stage.
    parts: how to put each stage together.
    used: for each stage, the model leaf at each place of `parts.params_def`.
    params: the model's own Variable of each leaf.
    other: for each stage its other state (rng keys and counts, statistics).
    loss: the caller's own loss; see `sojax.models.loss.loss_function`.
  """

  shape: ModelShape
  modules: tuple[nnx.Module, ...]
  parts: tuple[StageParts, ...]
  used: tuple[tuple[int, ...], ...]
  params: tuple[nnx.Variable, ...]
  other: tuple[tuple[Any, ...], ...]
  loss: Callable[..., Any] | None = None

  def write_other(self, other: Sequence[Sequence[Any]]) -> None:
    """Writes each stage's other state into the model's own modules."""
    for module, parts, leaves in zip(
      self.modules, self.parts, other, strict=True
    ):
      nnx.update(module, jax.tree.unflatten(parts.other_def, leaves))


def split_model(
  model: Any,
  optimizer: Optimizer,
  trainable: Any = nnx.Param,
  loss: Callable[..., Any] | None = None,
) -> SplitModel:
  """Splits a model into stages, and these into parameters and the rest.

  Args:
    model: a Flax NNX module, of one stage if it has no `stages()`; its Params
      may be abstract.
    optimizer: gives every trained parameter its hyper-parameter group.
    trainable: an nnx filter over the model's Params; the others stay as they
      are.
    loss: see `sojax.models.loss.loss_function`.

  Returns:
    The parts.

  Raises:
    ValueError: if it is not a module, stage names repeat, a Param is in no
      stage, other state is in two, nothing is trained, masks or labels do not
      fit the trained parameters, or the loss cannot be called.
  """
  if loss is not None and not callable(loss):
    raise ValueError(
      f"loss is a {type(loss).__name__}; it must be a function of (y, targets,"
      " mask)"
    )
  stages = _stages(model)
  groups = _Groups(model, optimizer, trainable)
  collected = _Collected(groups)
  for number, stage in enumerate(stages):
    collected.add(number, stage)
  collected.check_complete(model)
  if not any(leaf.trained for leaf in collected.leaves):
    raise ValueError(f"trainable={trainable} selects no parameter of the model")
  shape = ModelShape(
    stage_names=tuple(stage.name for stage in stages),
    leaves=tuple(collected.leaves),
    borrowed=tuple(collected.borrowed),
    groups=groups.groups,
  )
  return SplitModel(
    shape=shape,
    modules=tuple(stage.module for stage in stages),
    parts=tuple(collected.parts),
    used=tuple(collected.used),
    params=tuple(collected.params),
    other=tuple(collected.other),
    loss=loss,
  )


class _Collected:
  """What is found while going through the stages in forward order."""

  def __init__(self, groups: "_Groups"):
    self.leaves: list[Leaf] = []
    self.params: list[nnx.Variable] = []
    self.parts: list[StageParts] = []
    self.used: list[tuple[int, ...]] = []
    self.borrowed: list[tuple[int, ...]] = []
    self.other: list[tuple[Any, ...]] = []
    self._groups = groups
    self._leaf_of: dict[int, int] = {}
    self._owner_of_other: dict[int, str] = {}

  def add(self, number: int, stage: Stage) -> None:
    """Takes the next stage apart."""
    graphdef, state, rest = nnx.split(stage.module, nnx.Param, ...)
    variables = _variables(stage.module)
    self._check_not_shared(stage, rest, variables)
    places = tuple(
      self._leaf(number, stage, path, variables[path])
      for path, _ in nnx.to_flat_state(state)
    )
    tied = tuple(p for p in places if self.leaves[p].stage != number)
    other_leaves, other_def = jax.tree.flatten(rest)
    self.parts.append(
      StageParts(graphdef, jax.tree.structure(state), other_def)
    )
    self.used.append(places)
    self.borrowed.append(tied)
    self.other.append(tuple(other_leaves))

  def check_complete(self, model: Any) -> None:
    """Raises ValueError if the model has a Param that no stage has."""
    for path, variable in _variables(model).items():
      known = id(variable) in self._leaf_of
      if isinstance(variable, nnx.Param) and not known:
        raise ValueError(
          f"parameter {'.'.join(map(str, path))} of the model is in none of its"
          " stages(); they must hold every Param"
        )

  def _leaf(
    self,
    number: int,
    stage: Stage,
    path: tuple[Any, ...],
    variable: nnx.Variable,
  ) -> int:
    """Returns the index of a Param's leaf; the first to come owns it."""
    known = self._leaf_of.setdefault(id(variable), len(self.leaves))
    if known == len(self.leaves):
      self.params.append(variable)
      self.leaves.append(
        Leaf(
          name=".".join([stage.name, *map(str, path)]),
          stage=number,
          shape=tuple(variable.shape),
          group=self._groups.group(variable),
        )
      )
    return known

  def _check_not_shared(
    self,
    stage: Stage,
    rest: nnx.State,
    variables: Mapping[tuple[Any, ...], nnx.Variable],
  ) -> None:
    for path, _ in nnx.to_flat_state(rest):
      name = f"{stage.name}.{'.'.join(map(str, path))}"
      owner = self._owner_of_other.setdefault(id(variables[path]), name)
      if owner != name:
        raise ValueError(
          f"{owner} and {name} are one Variable in two stages, which would each"
          " get a copy; give each stage its own (rngs.fork() for random keys)"
        )


def _stages(model: Any) -> list[Stage]:
  if not isinstance(model, nnx.Module):
    raise ValueError(
      f"model is a {type(model).__name__}; it must be a Flax NNX module"
    )
  stages = stages_of(model)
  names = [stage.name for stage in stages]
  repeated = sorted({name for name in names if names.count(name) > 1})
  if repeated:
    raise ValueError(f"stage name {repeated[0]!r} repeats; names must differ")
  if not stages:
    raise ValueError("stages() gave no stage; at least one is needed")
  return stages


def _variables(module: nnx.Module) -> dict[tuple[Any, ...], nnx.Variable]:
  return {
    path: node
    for path, node in nnx.iter_graph(module)
    if isinstance(node, nnx.Variable)
  }


class _Groups:
  """The hyper-parameter group of each trained Variable."""

  def __init__(self, model: Any, optimizer: Optimizer, trainable: Any):
    state = nnx.state(model, nnx.All(nnx.Param, trainable))
    variables = _variables(model)
    trained = [variables[path] for path, _ in nnx.to_flat_state(state)]
    order = _tree_order(state)
    hypers = _resolve(optimizer, state)
    distinct: list[AdamW] = []
    self._group: dict[int, int] = {}
    for variable, place in zip(trained, order, strict=True):
      hyper = hypers[place]
      if hyper not in distinct:
        distinct.append(hyper)
      self._group[id(variable)] = distinct.index(hyper)
    self.groups = tuple(distinct)

  def group(self, variable: nnx.Variable) -> int | None:
    return self._group.get(id(variable))


def _tree_order(state: nnx.State) -> list[int]:
  """Returns, in flat-state order, each leaf's place in jax.tree.leaves."""
  leaves, treedef = jax.tree.flatten(state)
  numbered = jax.tree.unflatten(treedef, range(len(leaves)))
  return [jax.tree.leaves(v)[0] for _, v in nnx.to_flat_state(numbered)]


def _resolve(optimizer: Optimizer, state: nnx.State) -> list[AdamW]:
  if isinstance(optimizer, Partition):
    labels = _broadcast(optimizer.param_labels, state, "param_labels")
    by_label: Mapping[str, list[AdamW]] = {
      label: _resolve(transform, state)
      for label, transform in optimizer.transforms.items()
    }
    unknown = sorted({str(x) for x in labels if x not in by_label})
    if unknown:
      raise ValueError(
        f"label {unknown[0]!r} has no transform; known: {sorted(by_label)}"
      )
    return [by_label[label][i] for i, label in enumerate(labels)]
  if not isinstance(optimizer, AdamW):
    raise ValueError(
      f"optimizer is a {type(optimizer).__name__}; use sojax.adamw(...) or"
      " sojax.partition(...)"
    )
  num_leaves = len(jax.tree.leaves(state))
  if optimizer.mask is None:
    return [optimizer.decayed()] * num_leaves
  mask = _broadcast(optimizer.mask, state, "mask")
  wrong = [x for x in mask if not isinstance(x, bool | np.bool_)]
  if wrong:
    raise ValueError(f"mask holds {wrong[0]!r}; it must hold bools")
  return [optimizer.decayed() if x else optimizer.undecayed() for x in mask]


def _broadcast(
  tree: Any | Callable[[Any], Any], state: nnx.State, name: str
) -> list[Any]:
  prefix = tree(state) if callable(tree) else tree
  try:
    return jax.tree.leaves(jax.tree.broadcast(prefix, state))
  except ValueError as error:
    raise ValueError(
      f"{name} does not fit the trainable parameters: {error}"
    ) from error
