"""Checks that all contenders do the same, before they are timed."""

from collections.abc import Iterable

import numpy as np

from experiments.adam.arrays import Arrays
from experiments.adam.pairing import Contender, State
from experiments.adam.settings import COUNT, HYPER, Setting
from sojax.reference.adamw import adamw_float64

_EPS = 2.0**-24  # of one rounding to float32


def check_agreement(
  contenders: Iterable[Contender], arrays: Arrays, setting: Setting
) -> None:
  """Runs each from the same state and compares with AdamW in float64.

  Bounds are wide enough for a few roundings in another order, and narrow
  enough that a missing weight decay, bias correction or step shows.

  Args:
    contenders: of these arrays, just made.
    arrays: their arrays as `Arrays.reset` leaves them; afterwards so again.
    setting: which gradients are read.

  Raises:
    RuntimeError: if one leaves another state.
  """
  before = tuple(x.astype(np.float64) for x in (arrays.p, arrays.mu, arrays.nu))
  grad = setting.grad(arrays).astype(np.float64)
  after = adamw_float64(
    *before,
    grad,
    count=COUNT,
    learning_rate=HYPER.learning_rate,
    b1=HYPER.b1,
    b2=HYPER.b2,
    eps=HYPER.eps,
    eps_root=HYPER.eps_root,
    weight_decay=HYPER.weight_decay,
  )
  p, mu, nu = before
  bounds = (
    4 * _EPS * abs(p) + 1e-4 * HYPER.learning_rate,
    8 * _EPS * (abs(mu) + abs(grad)),
    8 * _EPS * (nu + grad**2),
  )
  for contender in contenders:
    arrays.reset()
    contender.before()
    contender.run()
    state = contender.state()
    if contender.steps:
      _check(contender.name, state, after, bounds)
    else:
      _check(contender.name, state, before, (0 * p, 0 * p, 0 * p))
    contender.after()
  arrays.reset()


def _check(name: str, state: State, expected, bounds) -> None:
  *actual, weight = state
  for kind, x, y, bound in zip(
    ("p", "mu", "nu"), actual, expected, bounds, strict=True
  ):
    error = abs(x.astype(np.float64) - y)
    if not np.all(error <= bound):
      worst = int(np.argmax(error - bound))
      raise RuntimeError(
        f"{name} left {kind}[{worst}]={x[worst]!r}, not {y[worst]!r}; its time"
        " would be that of something else"
      )
  if weight is None:
    return
  # To 8 bits, in whichever way; the stream cuts off.
  p = actual[0].astype(np.float64)
  if not np.all(abs(weight.astype(np.float64) - p) <= 2.0**-7 * abs(p)):
    raise RuntimeError(f"{name} wrote weights that are not its masters")
