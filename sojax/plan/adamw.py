"""AdamW as a specification: hyper-parameters and their rounded scalars.

Nothing here touches an array. The host kernel, the device update and the
NumPy twins all take the same `AdamScalars`, so that they compute the same
formula.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Schedule = Callable[[int], Any]
"""Maps an optimizer step count to a scalar; optax schedules fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW:
  """Hyper-parameters of AdamW (Loshchilov and Hutter, arXiv 1711.05101).

  Attributes:
    learning_rate: a number, or a schedule called with the step count.
    b1: decay of the first moment, in [0, 1).
    b2: decay of the second moment, in [0, 1).
    eps: added to the denominator outside the square root.
    eps_root: added inside the square root.
    weight_decay: decoupled decay, a number or a schedule; times the learning
      rate.
    mask: which parameters decay: a tree of bools (or a prefix of one) over the
      trainable parameters, or a function from that tree; None decays all.
  """

  learning_rate: float | Schedule
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  eps_root: float = 0.0
  weight_decay: float | Schedule = 1e-4
  mask: Any = None

  def __post_init__(self):
    for name in ("b1", "b2"):
      value = getattr(self, name)
      if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}={value} must lie in [0, 1)")
    for name in ("eps", "eps_root"):
      value = getattr(self, name)
      if not 0.0 <= value < math.inf:
        raise ValueError(f"{name}={value} must be finite and at least 0")
    if self.eps == 0.0 and self.eps_root == 0.0:
      raise ValueError(
        "eps=0 and eps_root=0 divide 0 by 0 where no gradient arrived;"
        " raise one of them"
      )
    for name in ("learning_rate", "weight_decay"):
      value = getattr(self, name)
      if not callable(value) and not math.isfinite(value):
        raise ValueError(f"{name}={value} must be finite")

  def undecayed(self) -> "AdamW":
    """Returns the same hyper-parameters without weight decay."""
    return dataclasses.replace(self, weight_decay=0.0, mask=None)

  def decayed(self) -> "AdamW":
    """Returns the same hyper-parameters for parameters that all decay."""
    return dataclasses.replace(self, mask=None)


@dataclasses.dataclass(frozen=True)
class Partition:
  """Several AdamWs, each for the parameters that carry its label.

  Attributes:
    transforms: the AdamW of each label.
    param_labels: a tree of labels (or a prefix of one) over the trainable
      parameters, or a function from that tree.
  """

  transforms: Mapping[str, AdamW]
  param_labels: Any


Optimizer = AdamW | Partition


def adamw(
  learning_rate: float | Schedule,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  eps_root: float = 0.0,
  mu_dtype: Any = None,
  weight_decay: float | Schedule = 1e-4,
  mask: Any = None,
  *,
  nesterov: bool = False,
) -> AdamW:
  """Describes AdamW with the signature of `optax.adamw`.

  Args:
    learning_rate: a number or a schedule of the step count.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the denominator outside the square root.
    eps_root: added inside the square root.
    mu_dtype: None or float32; moments are float32 here.
    weight_decay: decoupled decay, a number or a schedule.
    mask: which parameters decay, as in optax.
    nesterov: not supported.

  Returns:
    The hyper-parameters, to be given to `sojax.Trainer`.

  Raises:
    ValueError: for a value out of its range, and for `nesterov` or another
      `mu_dtype`.

  >>> adamw(1e-3, b2=0.95, weight_decay=0.1).b2
  0.95
  """
  if nesterov:
    raise ValueError("nesterov=True is not supported; use nesterov=False")
  if mu_dtype is not None and np.dtype(mu_dtype) != np.float32:
    raise ValueError(
      f"mu_dtype={mu_dtype} is not supported; moments are float32"
    )
  return AdamW(
    learning_rate=learning_rate,
    b1=b1,
    b2=b2,
    eps=eps,
    eps_root=eps_root,
    weight_decay=weight_decay,
    mask=mask,
  )


def partition(transforms: Mapping[str, AdamW], param_labels: Any) -> Partition:
  """Gives each labelled set of parameters its own AdamW, as optax.partition.

  Args:
    transforms: the AdamW of each label.
    param_labels: a tree of labels (or a prefix), or a function from the tree
      of trainable parameters to one.

  Returns:
    The optimizer, to be given to `sojax.Trainer`.

  Raises:
    ValueError: if `transforms` is empty or holds something else than AdamW.
  """
  if not transforms:
    raise ValueError("transforms={} must hold at least one AdamW")
  for label, transform in transforms.items():
    if not isinstance(transform, AdamW):
      raise ValueError(
        f"transforms[{label!r}] is a {type(transform).__name__}; use"
        " sojax.adamw(...)"
      )
  return Partition(dict(transforms), param_labels)


@dataclasses.dataclass(frozen=True, slots=True)
class AdamScalars:
  """The scalars of one AdamW step, each rounded once to float32.

  With t = count + 1, lr and wd the learning rate and decay at `count`:

  Attributes:
    b1: decay of the first moment.
    b2: decay of the second moment.
    one_minus_b1: 1 - b1, subtracted in double precision.
    one_minus_b2: 1 - b2, subtracted in double precision.
    k: 1 / sqrt(1 - b2^t), the bias correction of the denominator.
    r: eps_root * (1 - b2^t).
    s: -lr / (1 - b1^t).
    d: -lr * wd.
    eps: added to the denominator.
  """

  b1: float
  b2: float
  one_minus_b1: float
  one_minus_b2: float
  k: float
  r: float
  s: float
  d: float
  eps: float


def adam_scalars(hyper: AdamW, count: int) -> AdamScalars:
  """Evaluates the schedules at `count` and rounds every scalar once.

  Args:
    hyper: the hyper-parameters.
    count: optimizer steps committed before this one, so 0 at the first step.

  Returns:
    The scalars of that step.

  Raises:
    ValueError: if a schedule gives something that is not finite.
  """
  t = count + 1
  lr = _at(hyper.learning_rate, count, "learning_rate")
  wd = _at(hyper.weight_decay, count, "weight_decay")
  correction_1 = 1.0 - hyper.b1**t
  correction_2 = 1.0 - hyper.b2**t
  return AdamScalars(
    b1=_round(hyper.b1),
    b2=_round(hyper.b2),
    one_minus_b1=_round(1.0 - hyper.b1),
    one_minus_b2=_round(1.0 - hyper.b2),
    k=_round(1.0 / math.sqrt(correction_2)),
    r=_round(hyper.eps_root * correction_2),
    s=_round(-lr / correction_1),
    d=_round(-lr * wd),
    eps=_round(hyper.eps),
  )


def _at(value: float | Schedule, count: int, name: str) -> float:
  result = value(count) if callable(value) else value
  if np.shape(result) != ():
    raise ValueError(
      f"{name} has shape {np.shape(result)} at step count {count}; a schedule"
      " must give a scalar"
    )
  scalar = float(result)
  if not math.isfinite(scalar):
    raise ValueError(f"{name} is {scalar} at step count {count}")
  return scalar


def _round(value: float) -> float:
  return float(np.float32(value))
