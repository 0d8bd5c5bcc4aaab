"""TrainState: everything that a checkpoint holds, wherever it lives."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sojax.cluster.mesh import Placement, pinned_host
from sojax.host.adam import moments
from sojax.host.arena import Arena
from sojax.host.speculation import make_host_buckets
from sojax.host.wire import WorkingCopy
from sojax.plan.buckets import Bucket, Layout, Leaf
from sojax.plan.casts import SeparateCasts
from sojax.programs.device_update import DeviceState
from sojax.programs.validate import ScaleState
from sojax.runtime.setup import Setup


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
  """Where a slice of a leaf lies: a range of one unit of one bucket."""

  start: int
  stop: int
  bucket: int
  unit: int
  offset: int


class TrainState:
  """Master weights, moments, counters and the model's other state.

  Attributes:
    layout: how the model is cut into buckets.
    host: the host buckets, by bucket index.
    device: the state of device buckets, by bucket index.
    other: for each stage its other state (rng keys and counts, statistics), as
      of the newest Validate that was issued.
    scale: the loss scale, likewise.
    count: optimizer steps committed.
    num_steps: steps begun, skipped ones included.
  """

  def __init__(
    self,
    setup: Setup,
    make_arena: Callable[..., Arena],
    working_copy: WorkingCopy,
  ):
    """Allocates the state and takes the masters from the model.

    Args:
      setup: the model; its parameters have passed `check_values`.
      make_arena: makes the arenas of the host buckets.
      working_copy: what split masters are halves of.
    """
    split, layout, placement = setup.split, setup.layout, setup.placement
    self.layout = layout
    self._placement = placement
    self.host = make_host_buckets(
      layout,
      setup.plan,
      SeparateCasts.of(setup.plan, setup.config),
      make_arena,
      working_copy.shards_inout,
    )
    self.device = {
      b.index: _zeros(b, placement) for b in layout.buckets if b.on_device
    }
    self.other = [
      tuple(_put(leaf, placement) for leaf in leaves) for leaves in split.other
    ]
    self._other_paths = [
      _paths(name, parts.other_def, len(leaves))
      for name, parts, leaves in zip(
        layout.model.stage_names, split.parts, split.other, strict=True
      )
    ]
    self._loss_scale = loss_scale = setup.config.active_loss_scale
    self.scale = self._scale_state(loss_scale.initial if loss_scale else 1.0, 0)
    self.count = 0
    self.num_steps = 0
    self._places = _places(layout)
    for index, param in enumerate(split.params):
      values = np.asarray(param.get_value(), np.float32).reshape(-1)
      self.write(index, "master", 0, values)

  @property
  def leaves(self) -> tuple[Leaf, ...]:
    """The model's parameters."""
    return self.layout.model.leaves

  def read(self, leaf: int, kind: str, start: int, stop: int) -> np.ndarray:
    """Returns a copy of a range of one leaf's state.

    Args:
      leaf: index of the leaf.
      kind: "master", "mu" or "nu"; the moments exist for trained leaves only.
      start: first element, in row-major order.
      stop: end of the range.

    Returns:
      float32 [stop - start].
    """
    values = np.empty(stop - start, np.float32)
    for place, low, high in self._overlaps(leaf, start, stop):
      first = place.offset + low - place.start
      part = slice(low - start, high - start)
      values[part] = self._read_unit(place, kind, first, first + high - low)
    return values

  def write(self, leaf: int, kind: str, start: int, values: np.ndarray) -> None:
    """Replaces a range of one leaf's state; see `read`.

    Args:
      leaf: index of the leaf.
      kind: "master", "mu" or "nu".
      start: first element.
      values: float32, one-dimensional.
    """
    for place, low, high in self._overlaps(leaf, start, start + values.size):
      first = place.offset + low - place.start
      new = values[low - start : high - start]
      if place.bucket in self.host:
        self.host[place.bucket].write(kind, place.unit, first, new)
      else:
        self._write_device(place, kind, first, new)

  def masters(self, bucket: Bucket) -> list[np.ndarray]:
    """Returns a bucket's masters, one flat float32 array per wire unit."""
    if bucket.index in self.device:
      return [self._on_host(x) for x in self.device[bucket.index].master]
    return [
      self.host[bucket.index].read("master", number, 0, unit.size)
      for number, unit in enumerate(bucket.units)
    ]

  def scalars(self) -> dict[str, int | float]:
    """Returns the counters and the loss scale, which is 0 if there is none."""
    scaled = self._loss_scale is not None
    return {
      "count": self.count,
      "num_steps": self.num_steps,
      "loss_scale": float(np.asarray(self.scale.scale)) if scaled else 0.0,
      "good_steps": int(np.asarray(self.scale.good_steps)),
    }

  def load_scalars(self, scalars: Mapping[str, int | float]) -> None:
    """Replaces the counters, and the loss scale where both sides have one."""
    self.count = int(scalars["count"])
    self.num_steps = int(scalars["num_steps"])
    if self._loss_scale is not None and scalars["loss_scale"]:
      self.scale = self._scale_state(
        scalars["loss_scale"], int(scalars["good_steps"])
      )

  def other_state(self) -> dict[str, np.ndarray]:
    """Returns a copy of the other state by name; rng keys as key data."""
    return {
      path: np.array(_data(leaf))
      for paths, leaves in zip(self._other_paths, self.other, strict=True)
      for path, leaf in zip(paths, leaves, strict=True)
    }

  def load_other_state(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Replaces the other state."""
    self.other = [
      tuple(
        _put(_like(leaf, arrays[path]), self._placement)
        for path, leaf in zip(paths, leaves, strict=True)
      )
      for paths, leaves in zip(self._other_paths, self.other, strict=True)
    ]

  def _scale_state(self, scale: float, good_steps: int) -> ScaleState:
    return ScaleState(
      scale=_put(np.float32(scale), self._placement),
      good_steps=_put(np.int32(good_steps), self._placement),
    )

  def _overlaps(
    self, leaf: int, start: int, stop: int
  ) -> Iterator[tuple[_Place, int, int]]:
    for place in self._places[leaf]:
      low, high = max(start, place.start), min(stop, place.stop)
      if low < high:
        yield place, low, high

  def _read_unit(
    self, place: _Place, kind: str, start: int, stop: int
  ) -> np.ndarray:
    if place.bucket in self.host:
      return self.host[place.bucket].read(kind, place.unit, start, stop)
    unit = getattr(self.device[place.bucket], kind)[place.unit]
    return self._on_host(unit)[start:stop]

  def _on_host(self, array: jax.Array) -> np.ndarray:
    """Returns a flat view of a copy; np.asarray would keep one for ever."""
    copy = jax.device_put(array, pinned_host(self._placement.units))
    return np.asarray(copy).reshape(-1)

  def _write_device(
    self, place: _Place, kind: str, first: int, new: np.ndarray
  ) -> None:
    state = self.device[place.bucket]
    units = list(getattr(state, kind))
    values = np.array(units[place.unit]).reshape(-1)
    values[first : first + new.size] = new
    shape = units[place.unit].shape
    units[place.unit] = jax.device_put(
      values.reshape(shape), self._placement.units
    )
    self.device[place.bucket] = dataclasses.replace(
      state, **{kind: tuple(units)}
    )


def check_values(setup: Setup) -> None:
  """Checks that a model can be trained from the values that it has.

  Args:
    setup: the model.

  Raises:
    ValueError: if a parameter has no value, or is not floating point.
  """
  for leaf, param in zip(
    setup.split.shape.leaves, setup.split.params, strict=True
  ):
    value = param.get_value()
    if isinstance(value, jax.ShapeDtypeStruct):
      raise ValueError(
        f"parameter {leaf.name} is abstract; initialise the model first"
      )
    if not jnp.issubdtype(value.dtype, jnp.floating):
      raise ValueError(
        f"parameter {leaf.name} is {value.dtype}; only floating point"
        " parameters are supported: make it another kind of nnx.Variable"
      )


def _zeros(bucket: Bucket, placement: Placement) -> DeviceState:
  columns = {
    kind: tuple(
      jax.device_put(jnp.zeros(unit.shape, jnp.float32), placement.units)
      for unit in bucket.units
    )
    for kind in ("master", *moments(bucket))
  }
  return DeviceState(**columns)


def _places(layout: Layout) -> list[list[_Place]]:
  places: list[list[_Place]] = [[] for _ in layout.model.leaves]
  for bucket in layout.buckets:
    for number, unit in enumerate(bucket.units):
      offset = 0
      for piece in unit.slices:
        places[piece.leaf].append(
          _Place(piece.start, piece.stop, bucket.index, number, offset)
        )
        offset += piece.size
  for pieces in places:
    pieces.sort(key=lambda place: place.start)
  for leaf, pieces in zip(layout.model.leaves, places, strict=True):
    assert sum(p.stop - p.start for p in pieces) == math.prod(leaf.shape)
  return places


def _paths(stage: str, other_def: Any, num_leaves: int) -> list[str]:
  tree = jax.tree.unflatten(other_def, range(num_leaves))
  return [
    stage + jax.tree_util.keystr(path)
    for path, _ in jax.tree.leaves_with_path(tree)
  ]


def _data(leaf: jax.Array) -> jax.Array:
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(leaf)
  return leaf


def _like(leaf: jax.Array, values: np.ndarray) -> Any:
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    impl = jax.random.key_impl(leaf)
    return jax.random.wrap_key_data(jnp.array(values), impl=impl)
  return values


def _put(leaf: Any, placement: Placement) -> jax.Array:
  """Copies a leaf to the device, sharing no memory with the caller."""
  copy = leaf if isinstance(leaf, jax.Array) else np.array(leaf)
  return jax.device_put(copy, placement.device)
