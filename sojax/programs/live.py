"""How much memory a program needs besides its arguments and results."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core

# Results that are another view of an operand, or that a compiler makes again
# wherever they are read rather than keep.
_FREE = frozenset(
  {
    "broadcast_in_dim",
    "copy",
    "expand_dims",
    "iota",
    "reshape",
    "squeeze",
    "stop_gradient",
  }
)


def peak_live_bytes(jaxpr: core.Jaxpr, *, min_itemsize: int = 1) -> int:
  """Returns the most bytes of intermediate values that live at once.

  Equations run in the order of the jaxpr, each value is held from the equation
  that makes it to the last that reads it, and nothing is fused but views and
  broadcasts. Arguments and results are not counted. A compiler fuses more and
  may order equations otherwise: of GPTs' stages XLA's CPU backend takes between
  half of this and all of it.

  Args:
    jaxpr: the program.
    min_itemsize: elements count at least as many bytes; 4 for the CPU backend,
      which widens 16-bit numbers to multiply matrices.

  Returns:
    Bytes.
  """
  roots = _roots(jaxpr)
  last_use: dict[Any, int] = {}
  for number, equation in enumerate(jaxpr.eqns):
    for operand in _variables(equation.invars):
      last_use[roots.get(operand, operand)] = number
  results = {roots.get(v, v) for v in _variables(jaxpr.outvars)}
  live: dict[Any, int] = {}
  total = peak = 0
  for number, equation in enumerate(jaxpr.eqns):
    for made in equation.outvars:
      if made in roots or made in results:
        continue
      live[made] = _bytes(made, min_itemsize)
      total += live[made]
    inside = max(
      (
        peak_live_bytes(inner, min_itemsize=min_itemsize)
        for inner in inner_jaxprs(equation)
      ),
      default=0,
    )
    peak = max(peak, total + inside)
    for dead in [v for v in live if last_use.get(v, -1) <= number]:
      total -= live.pop(dead)
  return peak


def inner_jaxprs(equation: Any) -> Iterator[core.Jaxpr]:
  """Yields the programs that an equation calls, loops over or chooses from."""
  for param in equation.params.values():
    for value in param if isinstance(param, tuple | list) else (param,):
      if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
      elif isinstance(value, core.Jaxpr):
        yield value


def _roots(jaxpr: core.Jaxpr) -> dict[Any, Any]:
  """Returns whose memory the values have that have none of their own.

  A constant that is spread is nobody's: its root is itself.
  """
  roots: dict[Any, Any] = {}
  for equation in jaxpr.eqns:
    if equation.primitive.name == "optimization_barrier":
      pairs = zip(equation.outvars, equation.invars, strict=True)
    elif equation.primitive.name in _FREE:
      operands = [*_variables(equation.invars), None]
      pairs = ((equation.outvars[0], operands[0]),)
    else:
      continue
    for made, operand in pairs:
      known = operand is not None and not isinstance(operand, core.Literal)
      roots[made] = roots.get(operand, operand) if known else made
  return roots


def _variables(atoms: Any) -> Iterator[Any]:
  return (atom for atom in atoms if not isinstance(atom, core.Literal))


def _bytes(variable: Any, min_itemsize: int) -> int:
  """Keys and tokens have no bytes that count."""
  aval = variable.aval
  if not hasattr(aval, "dtype") or not hasattr(aval.dtype, "itemsize"):
    return 0
  return aval.size * max(aval.dtype.itemsize, min_itemsize)
