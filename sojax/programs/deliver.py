"""What becomes of the gradients of a backward, inside its program.

They are added to those of borrowers and of earlier micro-batches; once they are
complete they are rounded, cut into wire units, and their squares are summed.
What the host adds up is rounded, cut and sent in every micro-batch.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

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
) -> BackwardOut:
  """Adds to what a backward returns what becomes of its gradients.

  Args:
    spec: the stage.
    last_micro: whether the gradients are complete with this micro-batch.
    params: the stage's parameters.
    grads: gradients of `spec.trained` and `spec.tied`.
    out: what else the backward returns.
    tied: gradients from borrowers, by place.
    partial: float32 sums over the micro-batches so far.
  """
  # Without them XLA fuses what follows into the computation of gradients, and
  # their bits would depend on what the wire carries and on how it is cut. One
  # for each, or every gradient would wait for the last one.
  grads = tuple(map(jax.lax.optimization_barrier, grads))
  num_own = len(spec.trained)
  out = dataclasses.replace(out, tied=grads[num_own:])
  totals = _with_borrowed(spec, grads[:num_own], tied)
  by_host = spec.num_sent is not None
  add = _add_units if by_host else _add_leaves
  return add(spec, last_micro, params, totals, out, partial)


def _with_borrowed(
  spec: StageSpec,
  grads: Sequence[jax.Array],
  tied: Mapping[int, Sequence[jax.Array]],
) -> dict[int, jax.Array]:
  """Adds borrowers' gradients, in float32; returns the totals by place."""
  totals = {}
  for place, grad in zip(spec.trained, grads, strict=True):
    total = grad.astype(jnp.float32)
    for borrowed in tied.get(place, ()):
      total = total + borrowed.astype(jnp.float32)
    totals[place] = total
  return totals


def _add_leaves(
  spec: StageSpec,
  last_micro: bool,
  params: Sequence[jax.Array],
  totals: Mapping[int, jax.Array],
  out: BackwardOut,
  partial: Sequence[jax.Array],
) -> BackwardOut:
  """Adds up whole leaves; the last micro-batch sends the sums."""
  sums = _add(partial, [*totals.values()])
  if not last_micro:
    return dataclasses.replace(out, partial=sums)
  on_wire = {
    place: _round(total, params[place].dtype).astype(spec.grad_dtype)
    for place, total in zip(totals, sums, strict=True)
  }
  return dataclasses.replace(
    out,
    units=to_units(on_wire, spec.units),
    sumsq=_sums_of_squares([*on_wire.values()]),
  )


def _add_units(
  spec: StageSpec,
  last_micro: bool,
  params: Sequence[jax.Array],
  totals: Mapping[int, jax.Array],
  out: BackwardOut,
  partial: Sequence[jax.Array],
) -> BackwardOut:
  """Sends what the host adds up, and adds up the other units."""
  on_wire = {
    place: _round(total, params[place].dtype).astype(spec.grad_dtype)
    for place, total in totals.items()
  }
  sent = to_units(on_wire, spec.units[: spec.num_sent])
  staying = spec.units[spec.num_sent :]
  sums = _add(partial, to_units(totals, staying))
  if not last_micro:
    return dataclasses.replace(out, units=sent, partial=sums)
  rest = [
    _round(total, params[unit.slices[0].place].dtype).astype(spec.grad_dtype)
    for total, unit in zip(sums, staying, strict=True)
  ]
  return dataclasses.replace(
    out, units=(*sent, *rest), sumsq=_sums_of_squares(rest)
  )


def _add(
  partial: Sequence[jax.Array], more: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
  """Adds to the sums so far, if there are any."""
  if not partial:
    return tuple(more)
  return tuple(a + b for a, b in zip(partial, more, strict=True))


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
