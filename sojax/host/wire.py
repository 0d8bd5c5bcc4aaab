"""Pinned buffers through which weights go to the device.

JAX owns the memory, so that its transfers need no staging copy; the kernels
write it in place. A buffer must not be written between the start of a transfer
from it and the moment when the transfer's destination is ready, and it is never
donated or given to a program.
"""

import ctypes
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Shard

from sojax.cluster.mesh import Placement, pinned_host
from sojax.plan.buckets import Bucket


class WireBuffer:
  """A pinned buffer of one wire unit.

  Attributes:
    array: the JAX array that owns the memory; the source of transfers.
    shards_inout: the same memory as writable one-dimensional NumPy arrays, one
      for each device's shard, in order.
  """

  def __init__(self, shape: tuple[int, ...], dtype: str, placement: Placement):
    zeros = jax.device_put(jnp.zeros(shape, dtype), placement.units)
    self.array = jax.device_put(zeros, pinned_host(placement.units))
    self.array.block_until_ready()
    self.shards_inout = [_writable(shard) for shard in _shards(self.array)]


class WorkingCopy:
  """The working weights of some host buckets, in pinned memory.

  Attributes:
    buffers: those of each wire unit, by bucket index.
  """

  def __init__(
    self, buckets: Iterable[Bucket], dtype: str, placement: Placement
  ):
    self.buffers = {
      bucket.index: [
        WireBuffer(unit.shape, dtype, placement) for unit in bucket.units
      ]
      for bucket in buckets
    }

  @property
  def shards_inout(self) -> dict[int, list[list[np.ndarray]]]:
    """The same memory as NumPy arrays: those of each shard of each unit."""
    return {
      index: [buffer.shards_inout for buffer in buffers]
      for index, buffers in self.buffers.items()
    }


def host_shards(array: jax.Array) -> list[np.ndarray]:
  """Returns views of an array in host memory, which it waits for.

  Args:
    array: a wire unit in pinned host memory.

  Returns:
    One flat, read-only array for each device's shard, in order.
  """
  return [np.asarray(shard).reshape(-1) for shard in _shards(array)]


def _shards(array: jax.Array) -> list[jax.Array]:
  def start(shard: Shard) -> int:
    return (shard.index[0].start or 0) if shard.index else 0

  return [shard.data for shard in sorted(array.addressable_shards, key=start)]


def _writable(array: jax.Array) -> np.ndarray:
  address = array.unsafe_buffer_pointer()
  memory: Any = (ctypes.c_byte * array.nbytes).from_address(address)
  return np.frombuffer(memory, array.dtype)


class WireRing:
  """A bounded set of buffers for each shape, taken and given back.

  Taking blocks while every buffer of the shape is on its way, so whoever takes
  must not be the one who gives back.
  """

  def __init__(
    self,
    counts: Mapping[tuple[int, ...], int],
    *,
    dtype: str,
    placement: Placement,
  ):
    """Allocates the buffers.

    Args:
      counts: how many buffers of each shape. Whoever takes several before any
        is given back must not need more.
      dtype: dtype of the buffers.
      placement: the mesh.
    """
    self._all = [
      WireBuffer(shape, dtype, placement)
      for shape, count in counts.items()
      for _ in range(count)
    ]
    self._free: dict[tuple[int, ...], list[WireBuffer]] = {}
    self._given_back = threading.Condition()
    self.reset()

  def reset(self) -> None:
    """Frees every buffer; nothing may be on its way."""
    with self._given_back:
      self._free = {buffer.array.shape: [] for buffer in self._all}
      self._put_back(self._all)

  def take(self, shape: tuple[int, ...]) -> WireBuffer:
    """Returns a free buffer of that shape; waits until there is one."""
    with self._given_back:
      self._given_back.wait_for(lambda: self._free[shape])
      return self._free[shape].pop(0)

  def give_back(self, buffers: Iterable[WireBuffer]) -> None:
    """Frees buffers whose transfers have arrived or failed."""
    with self._given_back:
      self._put_back(buffers)

  def _put_back(self, buffers: Iterable[WireBuffer]) -> None:
    for buffer in buffers:
      self._free[buffer.array.shape].append(buffer)
    self._given_back.notify_all()
