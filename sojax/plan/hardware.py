"""What a machine can do: rates, sizes and latencies, each with its source."""

import bisect
import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sojax.plan.plan import DTYPE_BYTES


class Resource(enum.StrEnum):
  """What tasks of several lanes share; a capacity is an amount per second."""

  HOST_MEMORY = "host_memory"
  DEVICE_MEMORY = "device_memory"
  HOST_CORES = "host_cores"


HOST_OPERATIONS = (
  "step",
  "record2",
  "record3",
  "copy",
  "undo",
  "redo",
  "accumulate",
  "widen",
  "narrow",
)
"""What the host does with buckets: a step, one that leaves a record of 2 or 3
bytes, the copies of "pingpong", taking a recorded step back, and again with
another scale, adding gradients up, and casts that are a pass of their own."""

_CURVES = ("efficiency", "d2h", "h2d", "d2h_pageable", "h2d_pageable")
_COUNTS = ("device_bytes", "host_bytes", "host_cores")
_RATES = ("device_bandwidth", "host_bandwidth", "network_bandwidth")
_LATENCIES = ("dispatch_s", "host_task_s", "network_latency_s")
_OPTIONAL = ("device_is_host", "sources", "measured_on")


@dataclasses.dataclass(frozen=True)
class Curve:
  """A quantity over a size: between its points linear in the size's logarithm.

  Outside of its points it is constant.

  Attributes:
    points: pairs of size and value, both positive, sizes increasing.

  >>> Curve(((1.0, 10.0), (100.0, 30.0))).at(10.0)
  20.0
  """

  points: tuple[tuple[float, float], ...]

  def __post_init__(self):
    if not self.points:
      raise ValueError("a curve of 0 points says nothing; give at least one")
    sizes = [size for size, _ in self.points]
    for size, value in self.points:
      if not (0 < size < math.inf and 0 < value < math.inf):
        raise ValueError(
          f"the point ({size}, {value}) of a curve must be positive and finite"
        )
    if any(a >= b for a, b in zip(sizes, sizes[1:], strict=False)):
      raise ValueError(f"the sizes {sizes} of a curve must increase")

  @classmethod
  def flat(cls, value: float) -> "Curve":
    """Returns the curve of a quantity that no size changes."""
    return cls(((1.0, value),))

  def at(self, size: float) -> float:
    """Returns the value at a size."""
    place = bisect.bisect_left(self.points, (size,))
    if place == 0:
      return self.points[0][1]
    if place == len(self.points):
      return self.points[-1][1]
    (low, before), (high, after) = self.points[place - 1 : place + 1]
    part = math.log(size / low) / math.log(high / low)
    return before + part * (after - before)

  def knee(self, share: float = 0.9) -> float:
    """Returns the smallest of its points' sizes with that share of the best.

    >>> Curve(((1.0, 10.0), (2.0, 95.0), (4.0, 100.0))).knee()
    2.0
    """
    best = max(value for _, value in self.points)
    return next(size for size, value in self.points if value >= share * best)

  def scaled(self, factor: float) -> "Curve":
    """Returns the curve of `factor` times the values."""
    return Curve(tuple((size, factor * value) for size, value in self.points))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareProfile:
  """One device and its share of a host.

  Attributes:
    name: what it is called.
    device_flops: peak FLOP/s, by the name of the dtype.
    efficiency: share of the peak that a program reaches, over its FLOPs.
    device_bytes: memory of the device.
    device_bandwidth: bytes/s of that memory, read and written together.
    d2h: bytes/s from the device to pinned host memory, over bytes.
    h2d: bytes/s back, likewise.
    d2h_pageable: the same to memory that is not pinned.
    h2d_pageable: the same back.
    host_bytes: memory of the host.
    host_bandwidth: bytes/s of that memory, read and written together.
    host_cores: cores that update buckets.
    host_rates: bytes/s that an operation moves, over the number of cores; by
      the names of `HOST_OPERATIONS`. Every array counts once for each time that
      it is read or written, records and copies included.
    dispatch_s: seconds of the thread that dispatches for each program or
      transfer.
    host_task_s: core seconds of the runtime's threads for each task, beside
      what it does; they count where programs run on the same cores.
    network_bandwidth: bytes/s that a device sends to others.
    network_latency_s: seconds of a collective of no bytes.
    device_is_host: whether programs run on the host's cores and memory, as on
      JAX's CPU backend.
    sources: where figures come from, by attribute.
    measured_on: what identifies the machine that was measured, such as its CPU;
      empty if figures were not measured together.
  """

  name: str
  device_flops: Mapping[str, float]
  efficiency: Curve
  device_bytes: int
  device_bandwidth: float
  d2h: Curve
  h2d: Curve
  d2h_pageable: Curve
  h2d_pageable: Curve
  host_bytes: int
  host_bandwidth: float
  host_cores: int
  host_rates: Mapping[str, Curve]
  dispatch_s: float
  host_task_s: float
  network_bandwidth: float
  network_latency_s: float
  device_is_host: bool = False
  sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
  measured_on: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for name in _COUNTS:
      _check_number(name, getattr(self, name), whole=True)
    for name in _RATES:
      _check_number(name, getattr(self, name))
    for name in _LATENCIES:
      _check_number(name, getattr(self, name), may_be_zero=True)
    _check_names("device_flops", self.device_flops, DTYPE_BYTES)
    for dtype, flops in self.device_flops.items():
      _check_number(f"device_flops[{dtype!r}]", flops)
    _check_names("host_rates", self.host_rates, HOST_OPERATIONS)
    missing = [x for x in HOST_OPERATIONS if x not in self.host_rates]
    if missing:
      raise ValueError(
        f"host_rates has no {missing}; give a curve of each of"
        f" {HOST_OPERATIONS}"
      )
    for flops, share in self.efficiency.points:
      if share > 1:
        raise ValueError(
          f"efficiency={share} at {flops} FLOPs must be at most 1; raise"
          " device_flops"
        )
    _check_names("sources", self.sources, _field_names())

  @property
  def capacities(self) -> dict[Resource, float]:
    """What tasks share, per second: bytes of memories, and cores."""
    shared = {
      Resource.HOST_MEMORY: self.host_bandwidth,
      Resource.DEVICE_MEMORY: self.device_bandwidth,
    }
    if self.device_is_host:
      shared[Resource.HOST_CORES] = float(self.host_cores)
    return shared

  def slowed(self, factor: float) -> "HardwareProfile":
    """Returns a machine on which everything takes `factor` times as long.

    Sizes of memories and numbers of cores stay, and `sources` are those of the
    figures before.

    Raises:
      ValueError: if the factor is not positive and finite.
    """
    _check_number("factor", factor)

    def slower(curve: Curve) -> Curve:
      return curve.scaled(1 / factor)

    return dataclasses.replace(
      self,
      name=f"{self.name}, {factor:g} times slower",
      device_flops={x: f / factor for x, f in self.device_flops.items()},
      device_bandwidth=self.device_bandwidth / factor,
      d2h=slower(self.d2h),
      h2d=slower(self.h2d),
      d2h_pageable=slower(self.d2h_pageable),
      h2d_pageable=slower(self.h2d_pageable),
      host_bandwidth=self.host_bandwidth / factor,
      host_rates={x: slower(rate) for x, rate in self.host_rates.items()},
      dispatch_s=self.dispatch_s * factor,
      host_task_s=self.host_task_s * factor,
      network_bandwidth=self.network_bandwidth / factor,
      network_latency_s=self.network_latency_s * factor,
    )

  def with_host_of(self, other: "HardwareProfile") -> "HardwareProfile":
    """Returns this device, its links and its network at another's host.

    The host is its memory, its cores and what they do, and the thread that
    dispatches; `measured_on` says which one it is.
    """
    replaced = [x for x in _field_names() if x.startswith("host_")]
    replaced.append("dispatch_s")
    kept = {x: y for x, y in self.sources.items() if x not in replaced}
    new = {x: y for x, y in other.sources.items() if x in replaced}
    return dataclasses.replace(
      self,
      name=f"{self.name}, at the host of {other.name}",
      sources={**kept, **new},
      measured_on=other.measured_on,
      **{x: getattr(other, x) for x in replaced},
    )

  def check_measured_on(self, machine: Mapping[str, str]) -> None:
    """Raises ValueError unless the profile was measured on this machine.

    Args:
      machine: what identifies it, as `measured_on` does.
    """
    if dict(self.measured_on) != dict(machine):
      raise ValueError(
        f"the profile {self.name!r} was measured on {dict(self.measured_on)},"
        f" and this machine is {dict(machine)}; calibrate here"
      )

  def to_json(self) -> dict[str, Any]:
    """Returns all attributes as JSON values; a curve is a list of pairs."""
    values = {name: getattr(self, name) for name in _field_names()}
    return {
      **{name: _to_json(value) for name, value in values.items()},
      "host_rates": {x: _to_json(rate) for x, rate in self.host_rates.items()},
    }

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "HardwareProfile":
    """Makes a profile of what `to_json` returned.

    Raises:
      ValueError: if an attribute is missing or unknown, or has another type, or
        a figure is out of its range; names it.
    """
    _check_json_types(values)
    made = dict(values)
    for name in _CURVES:
      made[name] = _curve(name, values[name])
    made["host_rates"] = {
      operation: _curve(f"host_rates[{operation!r}]", points)
      for operation, points in values["host_rates"].items()
    }
    return cls(**made)

  def save(self, path: str | Path) -> None:
    """Writes the profile as JSON."""
    text = json.dumps(self.to_json(), indent=2, allow_nan=False)
    Path(path).write_text(text + "\n")

  @classmethod
  def load(cls, path: str | Path) -> "HardwareProfile":
    """Reads what `save` wrote.

    Raises:
      ValueError: if it is not JSON, or see `from_json`.
      OSError: if the file cannot be read.
    """
    try:
      values = json.loads(Path(path).read_text())
    except ValueError as error:
      raise ValueError(f"{path} is not JSON: {error}") from error
    _check_type(f"the profile in {path}", values, Mapping)
    try:
      return cls.from_json(values)
    except ValueError as error:
      raise ValueError(f"{path}: {error}") from error


def _field_names() -> tuple[str, ...]:
  return tuple(field.name for field in dataclasses.fields(HardwareProfile))


def _check_json_types(values: Mapping[str, Any]) -> None:
  """Checks names, and the types that the profile itself does not check."""
  _check_names("the profile", values, _field_names())
  missing = [x for x in _field_names() if x not in {*values, *_OPTIONAL}]
  if missing:
    raise ValueError(f"the profile has no {missing}; calibrate again")
  _check_type("name", values["name"], str)
  _check_type("device_is_host", values.get("device_is_host", False), bool)
  for name in ("device_flops", "host_rates", "sources", "measured_on"):
    _check_type(name, values.get(name, {}), Mapping)
  for name in ("sources", "measured_on"):
    for key, text in values.get(name, {}).items():
      _check_type(f"{name}[{key!r}]", text, str)


def _to_json(value: Any) -> Any:
  if isinstance(value, Curve):
    return [list(point) for point in value.points]
  return dict(value) if isinstance(value, Mapping) else value


def _curve(name: str, points: Any) -> Curve:
  """Makes a curve of JSON values; `name` is for errors."""
  _check_type(name, points, Sequence)
  for point in points:
    _check_type(f"a point of {name}", point, Sequence)
    if len(point) != 2:
      raise ValueError(f"the point {point} of {name} must have 2 numbers")
    for number in point:
      _check_number(f"{number!r} in {name}", number)
  try:
    return Curve(tuple((float(size), float(value)) for size, value in points))
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from error


def _check_type(name: str, value: Any, wanted: type) -> None:
  if not isinstance(value, wanted):
    raise ValueError(
      f"{name}={value!r} is a {type(value).__name__}; it must be a"
      f" {wanted.__name__}"
    )


def _check_number(
  name: str, value: Any, *, whole: bool = False, may_be_zero: bool = False
) -> None:
  number = isinstance(value, int if whole else int | float)
  if not number or isinstance(value, bool):
    raise ValueError(
      f"{name}={value!r} must be {'an integer' if whole else 'a number'}"
    )
  if not (0 <= value < math.inf) or (value == 0 and not may_be_zero):
    bound = "at least 0" if may_be_zero else "positive"
    raise ValueError(f"{name}={value!r} must be {bound} and finite")


def _check_names(what: str, given: Mapping[str, Any], known: Any) -> None:
  unknown = [name for name in given if name not in known]
  if unknown or (not given and what == "device_flops"):
    raise ValueError(f"{what} has {unknown or 'no names'}; use {tuple(known)}")
