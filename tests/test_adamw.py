"""The AdamW specification. Oracle: decimal-free double arithmetic and optax."""

import inspect
import math

import numpy as np
import optax
import pytest

from sojax.plan.adamw import AdamW, adam_scalars, adamw, partition


def test_adamw_has_the_signature_of_optax():
  ours = inspect.signature(adamw).parameters
  theirs = inspect.signature(optax.adamw).parameters
  assert list(ours) == list(theirs)
  for name, parameter in theirs.items():
    assert ours[name].kind == parameter.kind, name
    assert ours[name].default == parameter.default, name


@pytest.mark.parametrize("count", [0, 1, 9, 12345])
def test_scalars_are_rounded_once_from_doubles(count):
  hyper = adamw(
    optax.linear_schedule(1e-3, 5e-4, 10),
    b1=0.9,
    b2=0.95,
    eps=1e-6,
    eps_root=1e-9,
    weight_decay=lambda count: 0.1 / (count + 1),
  )
  t, lr = count + 1, float(optax.linear_schedule(1e-3, 5e-4, 10)(count))
  expected = {
    "b1": 0.9,
    "b2": 0.95,
    "one_minus_b1": 1 - 0.9,
    "one_minus_b2": 1 - 0.95,
    "k": 1 / math.sqrt(1 - 0.95**t),
    "r": 1e-9 * (1 - 0.95**t),
    "s": -lr / (1 - 0.9**t),
    "d": -lr * 0.1 / (count + 1),
    "eps": 1e-6,
  }
  scalars = adam_scalars(hyper, count)
  for name, value in expected.items():
    assert getattr(scalars, name) == float(np.float32(value)), name


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"b1": 1.0}, r"b1=1.0 must lie in \[0, 1\)"),
    ({"b2": -0.1}, r"b2=-0.1 must lie in \[0, 1\)"),
    ({"eps": -1.0}, "eps=-1.0"),
    ({"eps": math.nan}, "eps=nan"),
    ({"eps": 0.0}, "eps=0 and eps_root=0"),
    ({"learning_rate": math.inf}, "learning_rate=inf"),
    ({"weight_decay": math.nan}, "weight_decay=nan"),
    ({"nesterov": True}, "nesterov=True"),
    ({"mu_dtype": "bfloat16"}, "mu_dtype=bfloat16"),
  ],
)
def test_values_out_of_range_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    adamw(**({"learning_rate": 1e-3} | changes))


def test_a_schedule_that_gives_nan_is_refused():
  with pytest.raises(ValueError, match="learning_rate is nan at step count 3"):
    adam_scalars(adamw(lambda count: math.nan), 3)


def test_partition_takes_adamw_only():
  with pytest.raises(ValueError, match=r"transforms\['x'\]"):
    partition({"x": 1e-3}, "x")  # pyright: ignore[reportArgumentType]
  with pytest.raises(ValueError, match="at least one"):
    partition({}, "x")


def test_undecayed_has_no_decay_and_no_mask():
  hyper = adamw(1e-3, weight_decay=0.3, mask=True)
  assert hyper.undecayed() == AdamW(learning_rate=1e-3, weight_decay=0.0)
  assert hyper.decayed() == AdamW(learning_rate=1e-3, weight_decay=0.3)
