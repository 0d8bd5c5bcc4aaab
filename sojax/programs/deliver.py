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
  grads: Sequence[jax.Array],
  tied: Mapping[int, Sequence[jax.Array]],
  partial: Sequence[jax.Array],
  route: jax.Array | None,
) -> BackwardOut:
  """Returns what becomes of a backward's gradients, and nothing else.

  On one device they are added up parameter by parameter, and the sums are cut
  into wire units. They are cut first, and added up unit by unit, if the host
  adds up some of the units, which leave at once, or on several devices: then
  every micro-batch's gradients are added up over the ranks, in float32, and
  each rank goes on with its shard of every unit.

  Args:
    spec: the stage.
    last_micro: whether the gradients are complete with this micro-batch.
    grads: gradients of `spec.trained` and `spec.tied`.
    tied: gradients from borrowers, by place.
    partial: float32 sums over the micro-batches so far.
    route: operand of the route of the units that are delivered here; None if
      none are.
  """
  # Without them XLA fuses what follows into the computation of gradients, and
  # their bits would depend on what the wire carries and on how it is cut. One
  # for each, or every gradient would wait for the last one.
  grads = tuple(map(jax.lax.optimization_barrier, grads))
  num_own = len(spec.trained)
  own = _with_borrowed(spec, grads[:num_own], tied)
  if spec.adds_units:
    items = tuple(map(spec.ranks.sum_scatter, to_units(own, spec.units)))
  else:
    items = tuple(own.values())
  sent = tuple(_on_wire(spec, x) for x in items[: spec.num_sent])
  sums = items[spec.num_sent :]
  if partial:
    sums = tuple(a + b for a, b in zip(partial, sums, strict=True))
  out = BackwardOut(
    sumsq=spec.ranks.stack(_zeros(len(sums))),
    tied=tuple(map(spec.ranks.stack, grads[num_own:])),
  )
  if not last_micro:
    units = _deliver_here(spec, sent, route)
    return dataclasses.replace(out, units=units, partial=sums)
  complete = tuple(_on_wire(spec, x) for x in sums)
  if spec.adds_units:
    units = sent + complete
  else:
    units = to_units(dict(zip(own, complete, strict=True)), spec.units)
  return dataclasses.replace(
    out,
    units=_deliver_here(spec, units, route),
    sumsq=spec.ranks.stack(_sums_of_squares(complete)),
  )


def _deliver_here(
  spec: StageSpec, units: Sequence[jax.Array], route: jax.Array | None
) -> tuple[jax.Array, ...]:
  """Delivers the first units, if there are any yet; returns the others.

  Nothing here says when: no delivery depends on another. XLA's CPU backend runs
  each soon after its gradient, while the rest of backward is still to come.
  """
  for place, unit in enumerate(units[: spec.num_delivered]):
    assert route is not None
    SINKS[spec.transport].send(unit, route, place)
  return tuple(units[spec.num_delivered :])


def _with_borrowed(
  spec: StageSpec,
  grads: Sequence[jax.Array],
  tied: Mapping[int, Sequence[jax.Array]],
) -> dict[int, jax.Array]:
  """Adds borrowers' gradients to the owner's, by place, in float32."""
  totals = {}
  for place, grad in zip(spec.trained, grads, strict=True):
    totals[place] = grad.astype(jnp.float32)
    for borrowed in tied.get(place, ()):
      own_rank = spec.ranks.unstack(borrowed)
      totals[place] = totals[place] + own_rank.astype(jnp.float32)
  return totals


def _on_wire(spec: StageSpec, total: jax.Array) -> jax.Array:
  """Rounds float32 sums to the working dtype, whatever the wire carries.

  The barrier, since XLA may leave out a cast that is widened again.
  """
  rounded = jax.lax.optimization_barrier(total.astype(spec.working_dtype))
  return rounded.astype(spec.grad_dtype)


def _sums_of_squares(grads: Sequence[jax.Array]) -> jax.Array:
  if not grads:
    return _zeros(0)
  return jnp.stack(
    [jnp.sum(jnp.square(grad.astype(jnp.float32))) for grad in grads]
  )


def _zeros(num_sums: int) -> jax.Array:
  """Returns sums of nothing, at least one.

  From a body of shard_map whose only result has no elements XLA removes
  everything, the deliveries as well.
  """
  return jnp.zeros((max(num_sums, 1),), jnp.float32)
