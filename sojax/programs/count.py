"""Counts what a jaxpr computes and moves, from its shapes alone.

FLOPs are those of products: two for each multiplication of a dot_general or a
convolution. All else is a small share in a large model, and counts as nothing.

Bytes of the device's memory are those that products, gathers and scatters read
and write, as if everything else were fused into them: a bound from below.

What is inside of a loop counts for each time. A scan says how often. A while
loop does not; it counts as half of the innermost scan around it, which is right
where it ends at the scan's own index, as in blockwise attention, and once where
there is none. Its FLOPs only: its blocks are small enough to stay in caches. Of
the branches of a cond the one with most FLOPs counts. Kernels that are no
jaxprs (cuDNN's) count as nothing: trace a model with its plain twin.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core

_PRODUCTS = ("dot_general", "conv_general_dilated")
_READ_SOME = ("gather", "dynamic_slice")


def live(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
  """Returns the equations that the results depend on, in their order.

  Inside of an equation everything is taken to be wanted.
  """
  wanted = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
  found = []
  for equation in reversed(jaxpr.eqns):
    if not wanted.isdisjoint(equation.outvars):
      wanted.update(
        v for v in equation.invars if not isinstance(v, core.Literal)
      )
      found.append(equation)
  return found[::-1]


def read_arguments(jaxpr: core.Jaxpr, first: int) -> frozenset[int]:
  """Returns which of the first arguments the results depend on."""
  wanted = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
  for equation in live(jaxpr):
    wanted.update(v for v in equation.invars if not isinstance(v, core.Literal))
  names = jaxpr.invars[:first]
  return frozenset(i for i, name in enumerate(names) if name in wanted)


def count_flops(jaxpr: core.Jaxpr) -> float:
  """Returns the floating-point operations that the results take.

  >>> import jax, jax.numpy as jnp
  >>> x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
  >>> count_flops(jax.make_jaxpr(lambda x: x @ x.T)(x).jaxpr)
  90.0
  """
  return sum(times * _flops(eqn) for eqn, times, _ in _walk(live(jaxpr), 1.0))


def count_bytes(jaxpr: core.Jaxpr) -> float:
  """Returns the bytes that the results take of the device's memory.

  The results themselves are written, once.
  """
  inside = sum(
    times * _bytes(eqn)
    for eqn, times, in_while in _walk(live(jaxpr), 1.0)
    if not in_while
  )
  results = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
  by_product = {
    v for eqn in jaxpr.eqns if _bytes(eqn) for v in eqn.outvars if v in results
  }
  return inside + sum(map(_size, results - by_product))


def _walk(
  equations: Sequence[core.JaxprEqn],
  times: float,
  around: float | None = None,
  in_while: bool = False,
) -> Iterator[tuple[core.JaxprEqn, float, bool]]:
  """Yields what is counted, how often it runs, and whether in a while loop.

  Args:
    equations: of a jaxpr.
    times: how often it runs.
    around: length of the innermost scan that it is in.
    in_while: whether it is in a while loop.
  """
  for equation in equations:
    params, name = equation.params, equation.primitive.name
    if name == "scan":
      length = params["length"]
      body = params["jaxpr"].jaxpr.eqns
      yield from _walk(body, times * length, length, in_while)
    elif name == "while":
      # Of n iterations, at the average of the indices 0 to n - 1.
      share = 1.0 if around is None else (around - 1) / 2
      body = params["body_jaxpr"].jaxpr.eqns
      yield from _walk(body, times * share, around, True)
    elif name == "cond":
      branches = [branch.jaxpr for branch in params["branches"]]
      largest = max(branches, key=lambda jaxpr: count_flops(jaxpr))
      yield from _walk(largest.eqns, times, around, in_while)
    elif name in _PRODUCTS or _moves(name):
      yield equation, times, in_while
    else:
      for jaxpr in _jaxprs(params.values()):
        yield from _walk(jaxpr.eqns, times, around, in_while)


def _moves(name: str) -> bool:
  return name in _READ_SOME or name.startswith("scatter")


def _jaxprs(values: Any) -> Iterator[core.Jaxpr]:
  for value in values:
    if isinstance(value, core.ClosedJaxpr):
      yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
      yield value
    elif isinstance(value, tuple | list):
      yield from _jaxprs(value)


def _flops(equation: core.JaxprEqn) -> float:
  params = equation.params
  if equation.primitive.name == "dot_general":
    (contracted, _), _ = params["dimension_numbers"]
    lhs = _shape(equation.invars[0])
    terms = math.prod(lhs[dim] for dim in contracted)
    return 2.0 * math.prod(_shape(equation.outvars[0])) * terms
  if equation.primitive.name == "conv_general_dilated":
    kernel = _shape(equation.invars[1])
    features = kernel[params["dimension_numbers"].rhs_spec[0]]
    terms = math.prod(kernel) / features
    return 2.0 * math.prod(_shape(equation.outvars[0])) * terms
  return 0.0


def _bytes(equation: core.JaxprEqn) -> float:
  name = equation.primitive.name
  if name in _PRODUCTS:
    return sum(map(_size, (*equation.invars, *equation.outvars)))
  if name in _READ_SOME:
    return 2 * _size(equation.outvars[0])
  if _moves(name):
    # What it adds to is read as far as it is written, or copied before.
    updates = equation.invars[2]
    return _size(equation.outvars[0]) + 3 * _size(updates)
  return 0.0


def _size(variable: Any) -> float:
  return float(math.prod(_shape(variable)) * variable.aval.dtype.itemsize)


def _shape(variable: Any) -> tuple[int, ...]:
  return variable.aval.shape
