"""Validate: the one decision about a step, from all sums of squares."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sojax.cluster.mesh import Placement
from sojax.programs.manual import manual_jit


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What Validate says, as arrays on the device.

  Attributes:
    grad_scale: float32, the factor of every gradient: min(1, clip / norm).
    finite: bool; False skips the step. A sum of squares past float32's range
      counts as not finite.
    norm: float32, the global norm before clipping.
  """

  grad_scale: jax.Array
  finite: jax.Array
  norm: jax.Array


jax.tree_util.register_dataclass(Verdict)


@functools.lru_cache
def make_validate(
  clip_norm: float | None, placement: Placement
) -> Callable[[Sequence[jax.Array]], Verdict]:
  """Returns the program from sums of squares to the verdict.

  Args:
    clip_norm: bound of the norm; None leaves gradients unscaled.
    placement: the mesh.

  Returns:
    A jitted function of the stages' `sumsq`, in forward order.
  """

  def validate(sumsqs: Sequence[jax.Array]) -> Verdict:
    total = jnp.sum(jnp.concatenate(list(sumsqs)))
    norm = jnp.sqrt(total)
    scale = jnp.ones((), jnp.float32)
    if clip_norm is not None:
      scale = jnp.minimum(scale, jnp.float32(clip_norm) / norm)
    return Verdict(grad_scale=scale, finite=jnp.isfinite(total), norm=norm)

  return manual_jit(validate, placement)


@functools.lru_cache
def make_keep_if_skipped(
  placement: Placement,
) -> Callable[..., tuple[jax.Array, ...]]:
  """Returns the program that takes other state back if a step is skipped."""

  def keep_if_skipped(
    finite: jax.Array, old: Sequence[jax.Array], new: Sequence[jax.Array]
  ) -> tuple[jax.Array, ...]:
    return tuple(
      jnp.where(finite, after, before)
      for before, after in zip(old, new, strict=True)
    )

  return manual_jit(keep_if_skipped, placement)
