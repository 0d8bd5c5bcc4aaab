"""Buckets: slices of parameters that are scheduled and updated together."""

import dataclasses
import fractions
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from sojax.plan.adamw import AdamW
from sojax.plan.plan import MIB

LARGE_SLICE_BYTES = MIB
"""A slice of this size crosses the link alone, in its own shape."""

CHUNK_ELEMS = 4096
"""Elements of a parameter whose gradients share one sum of squares on the host.

A parameter is cut between chunks only, so that the norm does not depend on how
it is cut."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
  """One parameter of the model.

  Attributes:
    name: "stage.path.to.param", unique in the model.
    stage: index of the stage that owns it.
    shape: its shape.
    group: index of its hyper-parameter group; None if it is not trained.
  """

  name: str
  stage: int
  shape: tuple[int, ...]
  group: int | None

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  @property
  def trained(self) -> bool:
    """Whether the optimizer updates it."""
    return self.group is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
  """A model as the planner sees it.

  Attributes:
    stage_names: the stages, in forward order.
    leaves: all parameters, stage by stage in forward order.
    borrowed: for each stage the indices of earlier stages' leaves it also uses
      (tied weights).
    groups: the hyper-parameters of each group.
  """

  stage_names: tuple[str, ...]
  leaves: tuple[Leaf, ...]
  borrowed: tuple[tuple[int, ...], ...]
  groups: tuple[AdamW, ...]

  @property
  def num_stages(self) -> int:
    """Number of stages."""
    return len(self.stage_names)

  def own(self, stage: int) -> tuple[int, ...]:
    """Returns the indices of the leaves that `stage` owns."""
    return self._own[stage]

  @functools.cached_property
  def _own(self) -> tuple[tuple[int, ...], ...]:
    by_stage: list[list[int]] = [[] for _ in self.stage_names]
    for index, leaf in enumerate(self.leaves):
      by_stage[leaf.stage].append(index)
    return tuple(map(tuple, by_stage))

  def used(self, stage: int) -> tuple[int, ...]:
    """Returns the indices of the leaves that `stage` computes with."""
    return self.own(stage) + self.borrowed[stage]


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
  """A range of one parameter's elements, in row-major order."""

  leaf: int
  start: int
  stop: int

  @property
  def size(self) -> int:
    """Number of elements."""
    return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class WireUnit:
  """What one transfer carries: one large slice, or small slices packed.

  Attributes:
    slices: the slices, in the order in which their elements lie.
    shape: a whole parameter's own shape, some of its rows, or one dimension. On
      several devices one dimension, with zeros after the slices, so that every
      device has a shard of the same length.
  """

  slices: tuple[Slice, ...]
  shape: tuple[int, ...]

  @functools.cached_property
  def size(self) -> int:
    """Number of elements, zeros at the end included."""
    return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Bucket:
  """Wire units that are updated together.

  Attributes:
    index: its place in the order in which backward finishes buckets.
    stage: the stage whose backward produces its gradients.
    group: its hyper-parameter group; None for weights that are not trained.
    units: what its transfers carry.
    on_device: whether its master weights and moments live on the device.
  """

  index: int
  stage: int
  group: int | None
  units: tuple[WireUnit, ...]
  on_device: bool

  @functools.cached_property
  def size(self) -> int:
    """Number of elements."""
    return sum(unit.size for unit in self.units)

  @property
  def trained(self) -> bool:
    """Whether the optimizer updates it."""
    return self.group is not None

  @property
  def host_updates(self) -> bool:
    """Whether the host updates it."""
    return self.trained and not self.on_device

  @property
  def slices(self) -> Iterator[Slice]:
    """All slices of the bucket, in the order in which its elements lie."""
    return (piece for unit in self.units for piece in unit.slices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """A model cut into buckets.

  Attributes:
    model: the model.
    buckets: in the order in which backward finishes them.
    num_shards: devices that each own a shard of every wire unit.
  """

  model: ModelShape
  buckets: tuple[Bucket, ...]
  num_shards: int = 1

  @property
  def on_both_sides(self) -> frozenset[int]:
    """Indices of leaves with parts in host buckets and in device buckets."""
    device, host = (
      {s.leaf for b in self.buckets if b.on_device is side for s in b.slices}
      for side in (True, False)
    )
    return frozenset(device & host)

  @property
  def updated_by_host(self) -> tuple[Bucket, ...]:
    """The buckets that the host updates."""
    return tuple(b for b in self.buckets if b.host_updates)

  def of_stage(self, stage: int) -> tuple[Bucket, ...]:
    """Returns the buckets of the leaves that `stage` owns."""
    return self._of_stage[stage]

  @functools.cached_property
  def _of_stage(self) -> tuple[tuple[Bucket, ...], ...]:
    by_stage: list[list[Bucket]] = [[] for _ in self.model.stage_names]
    for bucket in self.buckets:
      by_stage[bucket.stage].append(bucket)
    return tuple(map(tuple, by_stage))

  def units_used_by(self, stage: int) -> tuple[tuple[Bucket, int], ...]:
    """Returns where the units are that hold anything `stage` computes with.

    Returns:
      Buckets, and the number of a unit in each.
    """
    used = set(self.model.used(stage))
    return tuple(
      (bucket, number)
      for bucket in self.used_by(stage)
      for number, unit in enumerate(bucket.units)
      if any(s.leaf in used for s in unit.slices)
    )

  def used_by(self, stage: int) -> tuple[Bucket, ...]:
    """Returns the buckets that hold anything `stage` computes with."""
    return self._used_by[stage]

  @functools.cached_property
  def _used_by(self) -> tuple[tuple[Bucket, ...], ...]:
    users: dict[int, list[int]] = {}
    for stage in range(self.model.num_stages):
      for leaf in self.model.used(stage):
        users.setdefault(leaf, []).append(stage)
    by_stage: list[list[Bucket]] = [[] for _ in self.model.stage_names]
    for bucket in self.buckets:
      leaves = {piece.leaf for piece in bucket.slices}
      for stage in {s for leaf in leaves for s in users.get(leaf, ())}:
        by_stage[stage].append(bucket)
    return tuple(map(tuple, by_stage))


def plan_buckets(
  model: ModelShape,
  *,
  bucket_bytes: int,
  elem_bytes: int,
  device_buckets: int = 0,
  host_ratio: float | None = None,
  num_shards: int = 1,
  backward_order: Sequence[int] | None = None,
) -> Layout:
  """Cuts a model into buckets in the order backward produces gradients.

  Backward reaches the last stage first, so its buckets come first. A bucket
  holds slices of one stage and one hyper-parameter group. A parameter that fits
  in a bucket is never cut; a larger one is cut into pieces of about equal size,
  at multiples of CHUNK_ELEMS elements, and at its rows where both can be had.
  O(slices).

  Args:
    model: the model.
    bucket_bytes: soft upper limit of one bucket, in bytes on the wire.
    elem_bytes: bytes of one element on the wire (2 for bfloat16).
    device_buckets: how many of the last trained buckets live on the device.
    host_ratio: instead of that, which part of them all does not; see
      `sojax.plan.plan.Plan`.
    num_shards: devices that each own a shard of every wire unit.
    backward_order: indices of all leaves; those of a stage in the order in
      which its backward finishes them. By default as they are in the model.

  Returns:
    The layout; its buckets hold every element of every leaf exactly once.

  Raises:
    ValueError: if `bucket_bytes` cannot hold a chunk, a parameter has no
      elements, or there are fewer trained buckets than `device_buckets`.
  """
  if bucket_bytes < CHUNK_ELEMS * elem_bytes:
    raise ValueError(
      f"bucket_bytes={bucket_bytes} cannot hold a chunk of {CHUNK_ELEMS}"
      f" elements of {elem_bytes} bytes; raise bucket_bytes to"
      f" {CHUNK_ELEMS * elem_bytes} or more"
    )
  for leaf in model.leaves:
    if leaf.size == 0:
      raise ValueError(
        f"parameter {leaf.name} has shape {leaf.shape} and no elements;"
        " remove it from the model"
      )
  limit = bucket_bytes // elem_bytes
  cut: list[tuple[int, int | None, list[Slice]]] = []
  order = backward_order or range(len(model.leaves))
  finished = {leaf: place for place, leaf in enumerate(order)}
  for stage in reversed(range(model.num_stages)):
    own = [i for i in order if model.leaves[i].stage == stage]
    groups = {model.leaves[i].group: None for i in own}
    of_stage = [
      (stage, group, slices)
      for group in groups
      for slices in _fill(
        model, [i for i in own if model.leaves[i].group == group], limit
      )
    ]
    # A bucket is finished when the last of its leaves is.
    cut += sorted(of_stage, key=lambda x: max(finished[s.leaf] for s in x[2]))
  num_trained = sum(group is not None for _, group, _ in cut)
  if host_ratio is not None:
    device_buckets = num_trained - _part(host_ratio, num_trained)
  if device_buckets > num_trained:
    raise ValueError(
      f"device_buckets={device_buckets} exceeds the {num_trained} trained"
      f" buckets of bucket_bytes={bucket_bytes}; lower device_buckets"
    )
  first_on_device = num_trained - device_buckets
  buckets = []
  trained = 0
  for stage, group, slices in cut:
    on_device = group is not None and trained >= first_on_device
    trained += group is not None
    units = _wire_units(model, slices, elem_bytes, num_shards)
    buckets.append(Bucket(len(buckets), stage, group, units, on_device))
  return Layout(model=model, buckets=tuple(buckets), num_shards=num_shards)


def _part(ratio: float, count: int) -> int:
  """Returns a part of some things, to the nearest whole; halves count as one.

  Of the decimal number that a float is written as: 0.9 of 10 are not less than
  9, and 0.7 of 5 are 3.5.
  """
  exact = fractions.Fraction(str(float(ratio))) * count
  return math.floor(exact + fractions.Fraction(1, 2))


def _fill(
  model: ModelShape, members: Sequence[int], limit_elems: int
) -> list[list[Slice]]:
  buckets: list[list[Slice]] = [[]]
  room = limit_elems
  for index in members:
    for piece in _cut(index, model.leaves[index], limit_elems):
      if piece.size > room and buckets[-1]:
        buckets.append([])
        room = limit_elems
      buckets[-1].append(piece)
      room -= piece.size
  return buckets


def _cut(index: int, leaf: Leaf, limit_elems: int) -> list[Slice]:
  if leaf.size <= limit_elems:
    return [Slice(index, 0, leaf.size)]
  grain = math.lcm(leaf.size // leaf.shape[0], CHUNK_ELEMS)
  if grain > limit_elems:
    grain = CHUNK_ELEMS
  num_grains = math.ceil(leaf.size / grain)  # the last one may be short
  num_pieces = math.ceil(num_grains / (limit_elems // grain))
  bounds = [num_grains * i // num_pieces * grain for i in range(num_pieces)]
  return [
    Slice(index, start, stop)
    for start, stop in itertools.pairwise([*bounds, leaf.size])
  ]


def _wire_units(
  model: ModelShape,
  slices: Sequence[Slice],
  elem_bytes: int,
  num_shards: int,
) -> tuple[WireUnit, ...]:
  def packed(pieces: Sequence[Slice]) -> WireUnit:
    elems = sum(piece.size for piece in pieces)
    padded = math.ceil(elems / num_shards) * num_shards
    return WireUnit(tuple(pieces), (padded,))

  def alone(piece: Slice) -> WireUnit:
    if num_shards > 1:
      return packed([piece])
    return WireUnit((piece,), _own_shape(piece, model.leaves[piece.leaf]))

  large = [s for s in slices if s.size * elem_bytes >= LARGE_SLICE_BYTES]
  small = [s for s in slices if s.size * elem_bytes < LARGE_SLICE_BYTES]
  units = [alone(piece) for piece in large]
  if len(small) == 1:
    units.append(alone(small[0]))
  elif small:
    units.append(packed(small))
  return tuple(units)


def _own_shape(piece: Slice, leaf: Leaf) -> tuple[int, ...]:
  if piece.size == leaf.size:
    return leaf.shape
  row_elems = leaf.size // leaf.shape[0]
  if piece.start % row_elems == 0 and piece.stop % row_elems == 0:
    return (piece.size // row_elems, *leaf.shape[1:])
  return (piece.size,)
