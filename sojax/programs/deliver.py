"""What becomes of the gradients of a backward, inside its program.

They are added to those of borrowers and of earlier micro-batches; once they are
complete they are rounded, cut into wire units, and their squares are summed.
Units that leave by callback are sent from here; the program returns the others.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from sojax.host.transports import SINKS
from sojax.programs.flatten import to_units
from sojax.programs.spec import BackwardOut, StageSpec


def deliver(
  spec: StageSpec,
  last_micro: bool,
  params: Sequence[jax.Array],
  grads: Sequence[jax.Array],
  out: BackwardOut,
  tied: Mapping[int, Sequence[jax.Array]],
  partial: Sequence[jax.Array],
  route: jax.Array | None,
) -> BackwardOut:
  """Adds to what a backward returns what becomes of its gradients.

  Args:
    spec: the stage.
    last_micro: whether the gradients are complete.
    params: the stage's parameters.
    grads: gradients of `spec.trained` and `spec.tied`.
    out: what else the backward returns.
    tied: gradients from borrowers, by place.
    partial: float32 sums over the micro-batches so far.
    route: operand of the route of `spec.leaving`; None if nothing leaves.
  """
  # Without them XLA fuses what follows into the computation of gradients, and
  # their bits would depend on what the wire carries and on how it is cut. One
  # for each, or every gradient would wait for the last one.
  grads = tuple(map(jax.lax.optimization_barrier, grads))
  num_own = len(spec.trained)
  sums = _add_up(spec, grads[:num_own], tied, partial)
  out = dataclasses.replace(out, tied=grads[num_own:])
  if not last_micro:
    return dataclasses.replace(out, partial=sums)
  by_place: list[jax.Array | None] = [None] * len(params)
  for place, total in zip(spec.trained, sums, strict=True):
    rounded = _round(total, params[place].dtype)
    by_place[place] = rounded.astype(spec.grad_dtype)
  on_wire = [grad for grad in by_place if grad is not None]
  units = to_units(by_place, spec.units)
  return dataclasses.replace(
    out, units=_send(spec, units, route), sumsq=_sums_of_squares(on_wire)
  )


def _send(
  spec: StageSpec, units: Sequence[jax.Array], route: jax.Array | None
) -> tuple[jax.Array, ...]:
  """Sends the units that leave; returns the others.

  Nothing here says when: no delivery depends on another. XLA's CPU backend runs
  one right after what computes its gradient, as that frees memory, and so while
  the rest of backward is still to come.
  """
  for place, position in enumerate(spec.leaving):
    assert route is not None
    SINKS[spec.transport].send(units[position], route, place)
  leaving = set(spec.leaving)
  return tuple(unit for i, unit in enumerate(units) if i not in leaving)


def _add_up(
  spec: StageSpec,
  grads: Sequence[jax.Array],
  tied: Mapping[int, Sequence[jax.Array]],
  partial: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
  """Adds borrowers' gradients and earlier micro-batches', in float32."""
  sums = []
  for number, (place, grad) in enumerate(zip(spec.trained, grads, strict=True)):
    total = grad.astype(jnp.float32)
    for borrowed in tied.get(place, ()):
      total = total + borrowed.astype(jnp.float32)
    if partial:
      total = partial[number] + total
    sums.append(total)
  return tuple(sums)


def _round(total: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Rounds float32 sums to the working dtype, whatever the wire carries.

  The barrier, since XLA may leave out a cast that is widened again.
  """
  return jax.lax.optimization_barrier(total.astype(dtype))


def _sums_of_squares(grads: Sequence[jax.Array]) -> jax.Array:
  if not grads:
    return jnp.zeros((0,), jnp.float32)
  return jnp.stack(
    [jnp.sum(jnp.square(grad.astype(jnp.float32))) for grad in grads]
  )
