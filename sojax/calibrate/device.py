"""The device: its FLOP/s, its memory, its links to the host."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sojax.calibrate.timing import Effort, cold_copies, median_s
from sojax.cluster.mesh import Placement, pinned_host
from sojax.plan.hardware import Curve


def _same(x: Any) -> Any:
  return x


@dataclasses.dataclass(frozen=True)
class Flops:
  """FLOP/s of matrix products.

  Attributes:
    peaks: the most that was seen, by dtype.
    efficiency: share of it over a product's FLOPs, of the fastest dtype.
    fastest: that dtype.
  """

  peaks: dict[str, float]
  efficiency: Curve
  fastest: str


def measure_flops(effort: Effort, dtypes: Sequence[str]) -> Flops:
  """Multiplies square matrices of several sizes."""
  rates = {dtype: _product_rates(effort, dtype) for dtype in dtypes}
  peaks = {dtype: max(of_dtype.values()) for dtype, of_dtype in rates.items()}
  fastest = max(peaks, key=lambda dtype: peaks[dtype])
  points = [(n, r / peaks[fastest]) for n, r in rates[fastest].items()]
  return Flops(peaks, Curve(tuple(points)), fastest)


def _product_rates(effort: Effort, dtype: str) -> dict[float, float]:
  """Returns FLOP/s by FLOPs."""
  multiply = jax.jit(jnp.matmul)
  rates = {}
  for dim in effort.matrix_dims:
    a = jax.random.normal(jax.random.key(0), (dim, dim)).astype(dtype)
    seconds = median_s(lambda _, a=a: _wait(multiply(a, a)), effort.seconds)
    rates[2.0 * dim**3] = 2.0 * dim**3 / seconds
    if seconds > effort.seconds:
      break
  return rates


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
  """Bytes/s of the device's memory, read and written together.

  Attributes:
    in_place: of a pass that changes an array.
    widening: of a cast from bfloat16 to float32, into new memory.
    narrowing: of one back.
  """

  in_place: float
  widening: float
  narrowing: float


def measure_memory(effort: Effort) -> DeviceMemory:
  """Streams over an array of float32, and casts it."""
  add = jax.jit(lambda x: x + 1, donate_argnums=0)
  elems = max(effort.device_bytes // 4, 1)
  arrays = [jnp.zeros(elems, jnp.float32)]

  def run(_) -> None:
    arrays[0] = _wait(add(arrays[0]))

  in_place = 8 * elems / median_s(run, effort.seconds)
  full = arrays.pop()
  half = full.astype(jnp.bfloat16)
  casts = []
  for x, dtype in ((half, jnp.float32), (full, jnp.bfloat16)):
    cast = jax.jit(functools.partial(lax.convert_element_type, new_dtype=dtype))
    seconds = median_s(lambda _, f=cast, x=x: _wait(f(x)), effort.seconds)
    casts.append(6 * elems / seconds)
  return DeviceMemory(in_place, *casts)


@dataclasses.dataclass(frozen=True)
class Links:
  """Bytes/s of transfers over bytes; attributes as in `HardwareProfile`."""

  d2h: Curve
  h2d: Curve
  d2h_pageable: Curve
  h2d_pageable: Curve


def measure_links(effort: Effort, placement: Placement) -> Links:
  """Sends arrays of several sizes in both directions.

  To and from pinned memory as the runtime does it. What is not pinned is
  NumPy's. There a device that is the host makes one copy, and shares no memory:
  what is sent starts off the boundary that sharing needs.
  """
  on_device = placement.units
  pinned = pinned_host(on_device)
  host = is_host(placement)
  # An array keeps what NumPy got of it, so each run takes a new one.
  fresh = _same if host else jax.jit(jnp.copy)

  def from_device(size: int) -> jax.Array:
    return _wait(jax.device_put(jnp.ones(size, jnp.uint8), on_device))

  def from_pinned(size: int) -> jax.Array:
    return _wait(jax.device_put(jnp.ones(size, jnp.uint8), pinned))

  def from_pageable(size: int) -> np.ndarray:
    return np.ones(size + 1, np.uint8)[1:]

  def to_pinned(x: jax.Array) -> jax.Array:
    return _wait(jax.device_put(x, pinned))

  def to_device(x: jax.Array | np.ndarray) -> jax.Array:
    return _wait(jax.device_put(x, on_device))

  return Links(
    d2h=_bandwidth(effort, from_device, to_pinned),
    h2d=_bandwidth(effort, from_pinned, to_device),
    d2h_pageable=_bandwidth(
      effort, from_device, np.array if host else np.asarray, fresh
    ),
    h2d_pageable=_bandwidth(effort, from_pageable, to_device),
  )


def _bandwidth(
  effort: Effort,
  source: Callable[[int], Any],
  send: Callable[[Any], Any],
  prepare: Callable[[Any], Any] = _same,
) -> Curve:
  """Returns bytes/s over the sizes of transfers.

  From 512 KiB on neither end is in a cache, as in training, where other tasks
  come between: a run sends what was sent longest ago, into memory that was as
  long unused. But `prepare` may have written what is sent just before.

  Args:
    effort: the sizes.
    source: makes something of a size to be sent.
    send: what is timed; takes a source.
    prepare: what becomes of a source before, not timed.
  """
  points = []
  for size in effort.transfer_bytes:
    number = cold_copies(size)
    sources = itertools.cycle([source(size) for _ in range(number)])
    received = collections.deque(
      (send(prepare(next(sources))) for _ in range(number)), number
    )
    seconds = median_s(
      lambda x, received=received: received.append(send(x)),
      effort.seconds,
      lambda sources=sources: _wait(prepare(next(sources))),
    )
    points.append((float(size), size / seconds))
  return Curve(tuple(points))


def is_host(placement: Placement) -> bool:
  """Returns whether programs run on the host's cores."""
  return placement.mesh.devices.flat[0].platform == "cpu"


def device_bytes(placement: Placement) -> int | None:
  """Returns the memory of a device, if it tells."""
  stats = placement.mesh.devices.flat[0].memory_stats()
  return None if stats is None else stats["bytes_limit"]


def _wait(x):
  return jax.block_until_ready(x)
