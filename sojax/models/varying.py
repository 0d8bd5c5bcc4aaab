"""Replicated parameters inside `jax.shard_map`.

Under `jax.shard_map` the type of a value names the mesh axes over which it
varies, and a custom gradient must have the type of the value it belongs to. A
replicated parameter varies over no axis, while its gradient, computed from
sharded activations, varies over theirs.
"""

import jax


def as_varying(x: jax.Array, *like: jax.Array) -> jax.Array:
  """Returns `x`, varying over every mesh axis that `x` or a `like` varies over.

  Its gradient is summed over the axes that were added, as the gradient of a
  replicated parameter must be. Outside of `jax.shard_map`, and there with
  check_vma=False, this is `x` itself.

  Args:
    x: any array.
    *like: arrays of any shape and dtype; only their mesh axes are looked at.
  """
  have = jax.typeof(x).manual_axis_type.varying
  want = {a for y in like for a in jax.typeof(y).manual_axis_type.varying}
  missing = tuple(sorted(want - have))
  return jax.lax.pcast(x, missing, to="varying") if missing else x
