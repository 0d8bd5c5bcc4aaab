"""The device mesh and the placements that programs and transfers use."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "seq")


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where arrays live.

  Attributes:
    mesh: a mesh with the axes "data" and "seq", of Auto type.
  """

  mesh: Mesh

  @classmethod
  def of(cls, mesh: Mesh | None) -> "Placement":
    """Returns the placement on a user's mesh.

    Args:
      mesh: a mesh with axes "data" and "seq", of any axis type; None takes the
        first device.

    Returns:
      The placement, on a mesh of Auto axes over the same devices.

    Raises:
      ValueError: for other axes, or more than one device.
    """
    devices = (
      np.array(jax.devices()[:1]).reshape(1, 1)
      if mesh is None
      else mesh.devices
    )
    axes = AXES if mesh is None else mesh.axis_names
    if tuple(axes) != AXES:
      raise ValueError(f"mesh axes {tuple(axes)} must be {AXES}")
    if devices.size != 1:
      raise ValueError(
        f"a mesh of {devices.size} devices is not there yet; use one device"
      )
    return cls(Mesh(devices, AXES))

  @property
  def device(self) -> NamedSharding:
    """Whole arrays in device memory."""
    return NamedSharding(self.mesh, PartitionSpec())

  @property
  def pinned_host(self) -> NamedSharding:
    """Whole arrays in page-locked host memory."""
    return self.device.with_memory_kind("pinned_host")
