"""Programs that are manual over every mesh axis, and what their ranks share.

Collectives are written out: compilers do not make these of sharding
constraints. On a mesh of one there are none, since even there they would cost.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sojax.cluster.mesh import AXES, Placement

WHOLE = PartitionSpec()
"""The same array on every device."""
ROWS = PartitionSpec("data")
"""Divided by the first dim, the rows of the batch."""
SHARDS = PartitionSpec(AXES)
"""One part for each device: of a wire unit its shard, else what `Ranks.stack`
makes."""


def manual_jit(
  function: Callable[..., Any],
  placement: Placement,
  *,
  in_specs: Any = WHOLE,
  out_specs: Any = WHOLE,
  donate: tuple[int, ...] = (),
) -> "Program":
  """Compiles a function as one `jax.shard_map`, manual over all axes.

  Args:
    function: takes and returns trees of arrays, of which it sees one device's
      parts.
    placement: the mesh. On one device everything is whole.
    in_specs: how arguments are divided: one spec for each, or for parts of it.
    out_specs: the same for the results.
    donate: positions of arguments whose buffers the results may reuse.

  Returns:
    The program; its arguments must be placed on the mesh.
  """
  if placement.num_devices == 1:
    in_specs = out_specs = WHOLE
  mapped = jax.shard_map(
    function,
    mesh=placement.mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    check_vma=False,
  )
  jitted = jax.jit(functools.wraps(function)(mapped), donate_argnums=donate)
  return Program(jitted, placement)


class Program:
  """A jitted function of one mesh, whatever mesh its caller has set."""

  def __init__(self, jitted: Any, placement: Placement):
    self._jitted = jitted
    self._placement = placement

  def __call__(self, *args: Any) -> Any:
    """Dispatches the program; waits for it only where the placement says so."""
    with jax.set_mesh(self._placement.mesh):
      results = self._jitted(*args)
    if self._placement.one_at_a_time:
      jax.block_until_ready(results)
    return results

  def lower(self, *args: Any) -> jax.stages.Lowered:
    """Lowers the program for arguments like these."""
    with jax.set_mesh(self._placement.mesh):
      return self._jitted.lower(*args)

  def eval_shape(self, *args: Any) -> Any:
    """Returns shapes and dtypes of the results, and computes nothing."""
    with jax.set_mesh(self._placement.mesh):
      return self._jitted.eval_shape(*args)


@dataclasses.dataclass(frozen=True)
class Ranks:
  """What the ranks of a program share; on one device nothing is done.

  Attributes:
    number: number of ranks.
  """

  number: int

  @property
  def alone(self) -> bool:
    """Whether there is one rank only."""
    return self.number == 1

  def index(self) -> jax.Array:
    """Returns this rank's number, int32."""
    return jax.lax.axis_index(AXES)

  def gather(self, shard: jax.Array) -> jax.Array:
    """Puts the shards of all ranks together, in order, along the first dim.

    16-bit values travel as integers: XLA may widen floating-point ones before
    it gathers them, and twice the bytes would cross the network.
    """
    if self.alone:
      return shard
    if shard.dtype.itemsize != 2:
      return jax.lax.all_gather(shard, AXES, tiled=True)
    bits = jax.lax.bitcast_convert_type(shard, jnp.uint16)
    whole = jax.lax.all_gather(bits, AXES, tiled=True)
    return jax.lax.bitcast_convert_type(whole, shard.dtype)

  def sum_scatter(self, x: jax.Array) -> jax.Array:
    """Adds up the ranks' arrays and returns this rank's shard of the sum."""
    if self.alone:
      return x
    return jax.lax.psum_scatter(x, AXES, tiled=True)

  def sum(self, x: jax.Array) -> jax.Array:
    """Adds up the ranks' arrays."""
    return x if self.alone else jax.lax.psum(x, AXES)

  def mean(self, x: jax.Array) -> jax.Array:
    """Averages the ranks' arrays."""
    return x if self.alone else jax.lax.pmean(x, AXES)

  def stack(self, x: jax.Array) -> jax.Array:
    """Returns an array of which every rank has its own, for spec SHARDS."""
    return x if self.alone else x[None]

  def unstack(self, x: jax.Array) -> jax.Array:
    """Returns this rank's array of those that were stacked."""
    return x if self.alone else x[0]
