"""AdamW for buckets whose state lives on the device."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sojax.cluster.mesh import Placement
from sojax.plan.adamw import AdamScalars
from sojax.programs.casts import narrow
from sojax.programs.manual import SHARDS, WHOLE, manual_jit


@dataclasses.dataclass(frozen=True)
class DeviceState:
  """Master weights and moments of a device bucket: float32, one per unit."""

  master: tuple[jax.Array, ...]
  mu: tuple[jax.Array, ...]
  nu: tuple[jax.Array, ...]


jax.tree_util.register_dataclass(DeviceState)


def scalar_array(scalars: AdamScalars) -> np.ndarray:
  """Returns the scalars as float32 [9], in the order of their fields."""
  return np.array(dataclasses.astuple(scalars), np.float32)


@functools.lru_cache
def make_device_update(
  working_dtype: str, placement: Placement
) -> Callable[..., tuple[DeviceState, tuple[jax.Array, ...], jax.Array]]:
  """Returns the program that updates one device bucket.

  The formula is the host kernel's (docs/design.md, Numerics), where the
  compiler may or may not fuse a multiplication with an addition: it agrees with
  the host within rounding, not in every bit.

  Args:
    working_dtype: dtype of the working weights.
    placement: the mesh.

  Returns:
    A jitted function (state, gradient units, scalars [9], grad_scale, finite)
    -> (new state, working weight units, finite). The state is donated. If
    `finite` is False the state comes back unchanged. In float32 the masters are
    the working weights, and the second result is empty.
  """

  def update(
    state: DeviceState,
    grads: Sequence[jax.Array],
    scalars: jax.Array,
    grad_scale: jax.Array,
    finite: jax.Array,
  ) -> tuple[DeviceState, tuple[jax.Array, ...], jax.Array]:
    stepped = [
      _step(p, mu, nu, g.astype(jnp.float32) * grad_scale, scalars, finite)
      for p, mu, nu, g in zip(
        state.master, state.mu, state.nu, grads, strict=True
      )
    ]
    master, mu, nu = (tuple(column) for column in zip(*stepped, strict=True))
    weights = ()
    if working_dtype != "float32":
      weights = tuple(narrow(p, working_dtype) for p in master)
    return DeviceState(master=master, mu=mu, nu=nu), weights, finite

  return manual_jit(
    update,
    placement,
    in_specs=(SHARDS, SHARDS, WHOLE, WHOLE, WHOLE),
    out_specs=(SHARDS, SHARDS, WHOLE),
    donate=(0,),
  )


def _step(
  p: jax.Array,
  mu: jax.Array,
  nu: jax.Array,
  g: jax.Array,
  scalars: jax.Array,
  finite: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  b1, b2, one_minus_b1, one_minus_b2, k, r, s, d, eps = scalars
  new_mu = mu * b1 + one_minus_b1 * g
  new_nu = nu * b2 + one_minus_b2 * (g * g)
  update = new_mu / (jnp.sqrt(new_nu + r) * k + eps) * s
  new_p = p + (p * d + update)
  return (
    jnp.where(finite, new_p, p),
    jnp.where(finite, new_mu, mu),
    jnp.where(finite, new_nu, nu),
  )
