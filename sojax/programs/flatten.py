"""Parameters of a stage <-> wire units, inside programs."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from sojax.plan.buckets import WireUnit


@dataclasses.dataclass(frozen=True, slots=True)
class UnitSlice:
  """A slice of the parameter at `place` among a stage's parameters."""

  place: int
  start: int
  stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class UnitSpec:
  """A wire unit, told by places within its stage: equal for equal blocks.

  The shape may have room for zeros after the slices.
  """

  slices: tuple[UnitSlice, ...]
  shape: tuple[int, ...]


def unit_specs(
  units: Iterable[WireUnit], used: Sequence[int]
) -> tuple[UnitSpec, ...]:
  """Returns the specs of wire units for one stage.

  Args:
    units: the units, in the order in which programs take or give them.
    used: the model leaf at each place of the stage.

  Returns:
    One spec per unit. Slices of leaves that the stage does not use have the
    place -1.
  """
  place = {leaf: i for i, leaf in enumerate(used)}
  return tuple(
    UnitSpec(
      tuple(
        UnitSlice(place.get(s.leaf, -1), s.start, s.stop) for s in unit.slices
      ),
      unit.shape,
    )
    for unit in units
  )


def to_units(
  leaves: Mapping[int, jax.Array], specs: Sequence[UnitSpec]
) -> tuple[jax.Array, ...]:
  """Cuts and packs a stage's leaves, by place, into wire units."""

  def piece(part: UnitSlice) -> jax.Array:
    leaf = leaves[part.place]
    if part.stop - part.start == leaf.size:
      return leaf.reshape(-1)
    return _cut(leaf, part)

  units = []
  for spec in specs:
    pieces = [piece(part) for part in spec.slices]
    num_zeros = math.prod(spec.shape) - sum(x.size for x in pieces)
    if num_zeros:
      pieces.append(jnp.zeros(num_zeros, pieces[0].dtype))
    flat = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
    units.append(flat.reshape(spec.shape))
  return tuple(units)


def _cut(leaf: jax.Array, part: UnitSlice) -> jax.Array:
  row_elems = math.prod(leaf.shape[1:])
  if part.start % row_elems == 0 and part.stop % row_elems == 0:
    rows = leaf[part.start // row_elems : part.stop // row_elems]
    return rows.reshape(-1)
  return leaf.reshape(-1)[part.start : part.stop]


def from_units(
  old: Mapping[int, jax.Array],
  units: Sequence[jax.Array],
  specs: Sequence[UnitSpec],
  shapes: Sequence[tuple[int, ...]],
) -> dict[int, jax.Array]:
  """Unpacks wire units into the leaves that they touch.

  Args:
    old: leaves by place; needed only where units bring a part of a leaf.
    units: arrays of the specs' shapes.
    specs: what each unit carries.
    shapes: the shape of the leaf at each place.

  Returns:
    The touched leaves by place. A leaf whose every element arrived is put
    together from its parts; another has its parts replaced in `old`.
  """
  parts: dict[int, list[tuple[UnitSlice, jax.Array]]] = {}
  for unit, spec in zip(units, specs, strict=True):
    flat, offset = unit.reshape(-1), 0
    for part in spec.slices:
      size = part.stop - part.start
      parts.setdefault(part.place, []).append(
        (part, flat[offset : offset + size])
      )
      offset += size
  parts.pop(-1, None)
  return {
    place: _join(pieces, old.get(place), shapes[place])
    for place, pieces in parts.items()
  }


def _join(
  pieces: list[tuple[UnitSlice, jax.Array]],
  old: jax.Array | None,
  shape: tuple[int, ...],
) -> jax.Array:
  pieces.sort(key=lambda item: item[0].start)
  if sum(part.stop - part.start for part, _ in pieces) == math.prod(shape):
    arrays = [array for _, array in pieces]
    whole = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)
    return whole.reshape(shape)
  assert old is not None
  flat = old.reshape(-1)
  for part, array in pieces:
    flat = flat.at[part.start : part.stop].set(array)
  return flat.reshape(shape)
