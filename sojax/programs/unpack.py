"""Arrived wire units -> the parameters of a stage."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax

from sojax.cluster.mesh import Placement
from sojax.plan.buckets import Bucket, ModelShape, WireUnit
from sojax.programs.casts import narrow
from sojax.programs.flatten import UnitSpec, from_units, unit_specs
from sojax.programs.manual import manual_jit


class Unpacker:
  """Puts parameters together from the wire units that carry them.

  A unit that is a whole parameter in the working dtype is taken as it is; the
  others go through one program per stage, which equal stages share.
  """

  def __init__(
    self,
    model: ModelShape,
    used: Sequence[Sequence[int]],
    working_dtype: str,
    placement: Placement,
  ):
    """Remembers the model.

    Args:
      model: the model.
      used: for each stage, the model leaf at each place.
      working_dtype: dtype of parameters on the device.
      placement: the mesh.
    """
    self._model = model
    self._used = used
    self._working_dtype = working_dtype
    self._placement = placement

  def whole_leaves(
    self, bucket: Bucket, units: Sequence[jax.Array]
  ) -> dict[int, jax.Array]:
    """Returns the units that are leaves as they arrive, by model index."""
    return {
      unit.slices[0].leaf: array
      for unit, array in zip(bucket.units, units, strict=True)
      if self._is_whole(unit) and array.dtype == self._working_dtype
    }

  def unpack(
    self,
    stage: int,
    arrived: Mapping[Bucket, Sequence[jax.Array]],
    old: Mapping[int, jax.Array],
  ) -> dict[int, jax.Array]:
    """Returns the leaves, by model index, that the arrived units touch.

    Args:
      stage: the stage whose parameters are wanted; units may also carry
        others, which are left out.
      arrived: the units of each bucket, on the device.
      old: leaves as they are; needed where only a part of one arrived.
    """
    used = self._used[stage]
    leaves: dict[int, jax.Array] = {}
    specs: list[UnitSpec] = []
    units: list[jax.Array] = []
    for bucket, arrays in arrived.items():
      whole = self.whole_leaves(bucket, arrays)
      leaves |= {leaf: whole[leaf] for leaf in whole if leaf in used}
      for unit, spec, array in zip(
        bucket.units, unit_specs(bucket.units, used), arrays, strict=True
      ):
        if unit.slices[0].leaf not in whole:
          specs.append(spec)
          units.append(array)
    if not units:
      return leaves
    shapes = tuple(self._model.leaves[leaf].shape for leaf in used)
    partly = _partly_arrived(specs, shapes)
    program = _make_program(
      tuple(specs), shapes, self._working_dtype, self._placement
    )
    unpacked = program({place: old[used[place]] for place in partly}, units)
    return leaves | {used[place]: leaf for place, leaf in unpacked.items()}

  def _is_whole(self, unit: WireUnit) -> bool:
    return (
      len(unit.slices) == 1
      and unit.shape == self._model.leaves[unit.slices[0].leaf].shape
    )


def _partly_arrived(
  specs: Sequence[UnitSpec], shapes: Sequence[tuple[int, ...]]
) -> list[int]:
  arrived = [0] * len(shapes)
  for spec in specs:
    for part in spec.slices:
      if part.place >= 0:
        arrived[part.place] += part.stop - part.start
  return [
    place
    for place, (elems, shape) in enumerate(zip(arrived, shapes, strict=True))
    if 0 < elems < math.prod(shape)
  ]


@functools.lru_cache
def _make_program(
  specs: tuple[UnitSpec, ...],
  shapes: tuple[tuple[int, ...], ...],
  working_dtype: str,
  placement: Placement,
) -> Callable[..., dict[int, jax.Array]]:
  def unpack(
    old: Mapping[int, jax.Array], units: Sequence[jax.Array]
  ) -> dict[int, jax.Array]:
    narrowed = [narrow_to_working(unit) for unit in units]
    return from_units(old, narrowed, specs, shapes)

  def narrow_to_working(unit: jax.Array) -> jax.Array:
    same = unit.dtype == working_dtype
    return unit if same else narrow(unit, working_dtype)

  return manual_jit(unpack, placement)
