"""Validate: the one decision about a step, from all sums of squares."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from sojax.cluster.mesh import Placement
from sojax.plan.config import LossScale
from sojax.programs.manual import SHARDS, WHOLE, Ranks, manual_jit

_LARGEST_SCALE = 2.0**24


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What Validate says, as arrays on the device.

  Attributes:
    grad_scale: float32, the factor of every gradient: min(1, clip / norm)
      over the loss scale.
    finite: bool; False skips the step. A sum of squares past float32's range
      counts as not finite.
    norm: float32, the global norm before clipping, of the loss as it is.
  """

  grad_scale: jax.Array
  finite: jax.Array
  norm: jax.Array


jax.tree_util.register_dataclass(Verdict)


@dataclasses.dataclass(frozen=True)
class ScaleState:
  """The loss scale on the device, or on the host.

  Attributes:
    scale: float32, what the next step's loss is multiplied by; 1 if the
      precision needs none.
    good_steps: int32, finite steps since it last changed.
  """

  scale: jax.Array
  good_steps: jax.Array


jax.tree_util.register_dataclass(ScaleState)


@functools.lru_cache
def make_validate(
  clip_norm: float | None, loss_scale: LossScale | None, placement: Placement
) -> Callable[..., tuple[Verdict, ScaleState]]:
  """Returns the program from sums of squares to the verdict.

  Args:
    clip_norm: bound of the norm; None only divides by the loss scale.
    loss_scale: how the loss scale changes; None leaves it.
    placement: the mesh.

  Returns:
    A jitted function of the stages' `sumsq`, in forward order; of the sum of
    squares of what the host has added up, a float32 scalar, or None; and of the
    ScaleState of this step. It returns the verdict and the next ScaleState.
    Every rank adds up all ranks' sums in the same order.
  """
  ranks = Ranks(placement.num_devices)

  def validate(
    sumsqs: Sequence[jax.Array], on_host: jax.Array | None, state: ScaleState
  ) -> tuple[Verdict, ScaleState]:
    of_rank = jnp.sum(jnp.concatenate([ranks.unstack(x) for x in sumsqs]))
    total = of_rank if ranks.alone else jnp.sum(ranks.gather(of_rank[None]))
    if on_host is not None:
      total = total + on_host
    unscale = 1.0 / state.scale
    norm = jnp.sqrt(total) * unscale
    clip_scale = jnp.ones((), jnp.float32)
    if clip_norm is not None:
      clip_scale = jnp.minimum(clip_scale, jnp.float32(clip_norm) / norm)
    finite = jnp.isfinite(total)
    verdict = Verdict(grad_scale=clip_scale * unscale, finite=finite, norm=norm)
    if loss_scale is not None:
      state = _next_scale(state, finite, loss_scale)
    return verdict, state

  return manual_jit(
    validate,
    placement,
    in_specs=(SHARDS, WHOLE, WHOLE),
    out_specs=(WHOLE, WHOLE),
  )


def _next_scale(
  state: ScaleState, finite: jax.Array, rule: LossScale
) -> ScaleState:
  good_steps = jnp.where(finite, state.good_steps + 1, 0)
  grows = good_steps == rule.growth_interval
  factor = jnp.where(grows, rule.growth_factor, 1.0)
  factor = jnp.where(finite, factor, rule.backoff_factor)
  scale = jnp.clip(state.scale * factor, 1.0, _LARGEST_SCALE)
  return ScaleState(
    scale=scale.astype(jnp.float32),
    good_steps=jnp.where(grows, 0, good_steps).astype(jnp.int32),
  )


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
