"""Arrived wire units -> parameters as the programs of a stage take them."""

import abc
from collections.abc import Mapping, Sequence

import jax

from sojax.cluster.mesh import Placement
from sojax.plan.buckets import Bucket, Layout
from sojax.programs.split_model import SplitModel
from sojax.programs.unpack import Unpacker


class Parameters(abc.ABC):
  """Parameters on the devices, ready or on their way."""

  @abc.abstractmethod
  def arrive(self, bucket: Bucket, units: Sequence[jax.Array]) -> None:
    """Takes a bucket's new weights, in place of those that it had."""

  @abc.abstractmethod
  def of_stage(
    self, stage: int, fetched: Mapping[Bucket, Sequence[jax.Array]]
  ) -> tuple[jax.Array, ...]:
    """Returns what the programs of a stage take.

    What a stage borrows and is not fetched, its owner has taken before.

    Args:
      stage: the stage.
      fetched: units of buckets that are here for this call only.
    """


class Leaves(Parameters):
  """On one device: whole parameters, by their places in the stage."""

  def __init__(
    self,
    split: SplitModel,
    layout: Layout,
    working_dtype: str,
    placement: Placement,
  ):
    self._layout = layout
    self._used = split.used
    self._on_both_sides = layout.on_both_sides
    self._unpacker = Unpacker(split.shape, split.used, working_dtype, placement)
    self._leaves: dict[int, jax.Array] = {}
    self._arrived: dict[int, Sequence[jax.Array]] = {}

  def arrive(self, bucket: Bucket, units: Sequence[jax.Array]) -> None:
    """Takes whole leaves as they are, and units until their stage's next use.

    No program of the step is still to be issued that would use the old leaves.
    They are dropped at once, or the device would hold the weights twice. Only a
    leaf on both sides keeps its old array: of a skipped step its device part
    arrives alone.
    """
    whole = self._unpacker.whole_leaves(bucket, units)
    self._arrived[bucket.index] = units
    for piece in bucket.slices:
      if piece.leaf not in self._on_both_sides:
        self._leaves.pop(piece.leaf, None)
    self._leaves.update(whole)

  def of_stage(
    self, stage: int, fetched: Mapping[Bucket, Sequence[jax.Array]]
  ) -> tuple[jax.Array, ...]:
    """Unpacks what has arrived and what is fetched; returns the leaves."""
    arrived = {
      bucket: self._arrived[bucket.index]
      for bucket in self._layout.of_stage(stage)
      if bucket.index in self._arrived
    }
    self._leaves.update(self._unpacker.unpack(stage, arrived, self._leaves))
    for bucket in arrived:
      del self._arrived[bucket.index]
    leaves = self._leaves | self._unpacker.unpack(stage, fetched, {})
    return tuple(leaves[leaf] for leaf in self._used[stage])


class Shards(Parameters):
  """On several devices: the units as they are, which programs gather."""

  def __init__(self, layout: Layout):
    self._layout = layout
    self._units: dict[int, Sequence[jax.Array]] = {}

  def arrive(self, bucket: Bucket, units: Sequence[jax.Array]) -> None:
    """Takes the units."""
    self._units[bucket.index] = units

  def of_stage(
    self, stage: int, fetched: Mapping[Bucket, Sequence[jax.Array]]
  ) -> tuple[jax.Array, ...]:
    """Returns the units that hold anything the stage computes with."""
    by_index = {bucket.index: units for bucket, units in fetched.items()}
    units = self._units | by_index
    return tuple(
      units[bucket.index][number]
      for bucket, number in self._layout.units_used_by(stage)
    )


def make_parameters(
  split: SplitModel, layout: Layout, working_dtype: str, placement: Placement
) -> Parameters:
  """Returns the kind for a number of devices, with nothing arrived."""
  if layout.num_shards > 1:
    return Shards(layout)
  return Leaves(split, layout, working_dtype, placement)
