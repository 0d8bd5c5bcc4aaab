"""The device mesh and the placements that programs and transfers use."""

import dataclasses
import os
import warnings

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "seq")

_THREADS_PER_DEVICE = 8
"""PJRT_NPROC=64 was enough for eight emulated devices, on one core as well."""

_GPUS = ("gpu", "cuda", "rocm")


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where arrays live.

  Attributes:
    mesh: a mesh with the axes "data" and "seq", of Auto type.
    one_at_a_time: whether a program must have ended before the next one is
      dispatched.
  """

  mesh: Mesh
  one_at_a_time: bool = False

  @classmethod
  def of(cls, mesh: Mesh | None) -> "Placement":
    """Returns the placement on a user's mesh.

    Emulated CPU devices of jax before 0.12 can wait for each other for ever if
    programs with collectives are dispatched ahead, unless the environment
    variable PJRT_NPROC gives them threads enough before jax starts. Without it
    a warning is given, and programs run one at a time.

    Args:
      mesh: a mesh with axes "data" and "seq", of any axis type; None takes the
        first device.

    Returns:
      The placement, on a mesh of Auto axes over the same devices.

    Raises:
      ValueError: for other axes, or an axis "seq" of more than one device.
    """
    devices = (
      np.array(jax.devices()[:1]).reshape(1, 1)
      if mesh is None
      else mesh.devices
    )
    axes = AXES if mesh is None else mesh.axis_names
    if tuple(axes) != AXES:
      raise ValueError(f"mesh axes {tuple(axes)} must be {AXES}")
    if devices.shape[1] != 1:
      raise ValueError(
        f"axis 'seq' has {devices.shape[1]} devices; sequence parallelism is"
        " not there yet: use a mesh of shape (devices, 1)"
      )
    one_at_a_time = _can_hang(devices)
    if one_at_a_time:
      warnings.warn(
        f"{devices.size} emulated CPU devices of jax {jax.__version__} can hang"
        " if programs are dispatched ahead; they run one at a time. Set"
        f" PJRT_NPROC={_THREADS_PER_DEVICE * devices.size} in the environment"
        " before jax starts to let them overlap",
        RuntimeWarning,
        stacklevel=3,
      )
    return cls(Mesh(devices, AXES), one_at_a_time)

  @property
  def platform(self) -> str:
    """What the devices are, such as "cpu" or "gpu"."""
    return self.mesh.devices.flat[0].platform

  @property
  def num_devices(self) -> int:
    """Devices of the mesh, each the owner of one shard of every wire unit."""
    return self.mesh.size

  @property
  def num_data_ranks(self) -> int:
    """Ranks among which the rows of a batch are divided."""
    return self.mesh.shape["data"]

  @property
  def device(self) -> NamedSharding:
    """Whole arrays in the memory of each device."""
    return NamedSharding(self.mesh, PartitionSpec())

  @property
  def rows(self) -> NamedSharding:
    """Arrays on the devices whose first dim is the batch."""
    return NamedSharding(self.mesh, PartitionSpec("data"))

  @property
  def units(self) -> NamedSharding:
    """Wire units on the devices: whole on one, else flat and in shards."""
    if self.num_devices == 1:
      return self.device
    return NamedSharding(self.mesh, PartitionSpec(AXES))


def pinned_host(sharding: NamedSharding) -> NamedSharding:
  """Returns where the same shards lie in page-locked host memory."""
  return sharding.with_memory_kind("pinned_host")


def pinned_limit_bytes(
  platform: str, variable: str, default_bytes: int
) -> int | None:
  """Returns how much pinned memory JAX hands out to a process.

  Args:
    platform: of the devices, such as "gpu".
    variable: what the environment calls it, in GiB.
    default_bytes: what it is if the environment does not name it.

  Returns:
    Bytes; None if there is no limit, as on "cpu".

  Raises:
    ValueError: if the environment names something else than a number.
  """
  if platform not in _GPUS:
    return None
  text = os.environ.get(variable)
  if text is None:
    return default_bytes
  if not text.isdecimal():
    raise ValueError(
      f"{variable}={text!r} is not a whole number of GiB; correct it"
    )
  return int(text) << 30


def _can_hang(devices: np.ndarray) -> bool:
  version = tuple(int(part) for part in jax.__version__.split(".")[:2])
  if devices.size == 1 or devices.flat[0].platform != "cpu":
    return False
  threads = os.environ.get("PJRT_NPROC", "0")
  enough = _THREADS_PER_DEVICE * devices.size
  return version < (0, 12) and not (
    threads.isdecimal() and int(threads) >= enough
  )
