"""Programs that are manual over every mesh axis."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from sojax.cluster.mesh import Placement


def manual_jit(
  function: Callable[..., Any],
  placement: Placement,
  *,
  donate: tuple[int, ...] = (),
) -> Callable[..., Any]:
  """Compiles a function as one `jax.shard_map`, manual over all axes.

  On a mesh of one, every argument and result is whole.

  Args:
    function: takes and returns trees of arrays.
    placement: the mesh.
    donate: positions of arguments whose buffers the results may reuse.

  Returns:
    The jitted function; its arguments must be placed on the mesh.
  """
  whole = PartitionSpec()
  mapped = jax.shard_map(
    function,
    mesh=placement.mesh,
    in_specs=whole,
    out_specs=whole,
    check_vma=False,
  )
  return jax.jit(functools.wraps(function)(mapped), donate_argnums=donate)
