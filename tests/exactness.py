"""A Trainer against plain JAX and optax, step by step from the same state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sojax.plan.adamw import adam_scalars
from sojax.reference.adamw import adamw_float32
from sojax.reference.loop import Loop
from tests.training import (
  SEQ_LEN,
  batches,
  optimizer,
  record,
  state_of,
)

EPS = {"fp32": 2.0**-24, "bf16": 2.0**-8}


def optax_adamw():
  """The twin of tests.training.optimizer for optax."""
  ours = optimizer()
  return optax.adamw(
    ours.learning_rate,
    b1=ours.b1,
    b2=ours.b2,
    eps=ours.eps,
    weight_decay=ours.weight_decay,
    mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
  )


def by_leaf(state, leaves, kind):
  return {
    leaf.name: state[f"{leaf.name} {kind}"].reshape(leaf.shape)
    for leaf in leaves
  }


def check_teacher_forced(ours, theirs: Loop, num_steps=30):
  """Starts each step of both from the Trainer's state.

  Gradients: every element comes out of sums of at most `length` rounded terms,
  so that it is off by at most length * eps of its leaf's largest element: a
  bound that a missing or doubled term breaks. bfloat16 rounds activations too,
  whose errors add up like a random walk: sqrt(length).

  Args:
    ours: a Trainer of tests.training.small_gpt.
    theirs: its oracle; has all rows in a micro-batch.
    num_steps: how many steps.
  """
  precision = theirs.config.precision
  rows = theirs.config.micro_batch * theirs.config.accumulation
  leaves = ours.layout.model.leaves
  steps = record(ours)
  hidden, blocks = 64, 2
  length = rows * SEQ_LEN + blocks * (12 * hidden + 2 * SEQ_LEN) + hidden
  slack = length if precision == "fp32" else np.sqrt(length)
  before = state_of(ours)
  for number, batch in enumerate(batches(num_steps, rows=rows)):
    metrics = ours.step(batch)
    after = state_of(ours)
    params = by_leaf(before, leaves, "master")
    loss, grads = theirs.loss_and_grads(batch, params)
    seen = steps[number]
    assert metrics.loss == pytest.approx(
      float(loss), rel=slack * EPS[precision]
    )
    for leaf in leaves:
      expected = np.asarray(grads[leaf.name]).reshape(-1)
      bound = slack * EPS[precision] * np.abs(expected).max()
      error = np.abs(seen.grads[leaf.name].astype(np.float32) - expected)
      assert error.max() <= bound, (number, leaf.name)
    check_update(ours, seen, number, before, after)
    before = after


def check_update(ours, seen, number, before, after):
  """Compares the update of the recorded gradients, every element.

  With our own float32 twin: bits. With optax: its float32 bias correction is
  off by up to 6.5e-6 of the update at b2 = 0.999 and less at 0.95, and both
  round each term of the update, and p, a few times.
  """
  leaves = ours.layout.model.leaves
  norm = np.sqrt(
    sum(np.sum(g.astype(np.float64) ** 2) for g in seen.grads.values())
  )
  assert seen.norm == pytest.approx(norm, rel=1e-5)
  scale = np.float32(min(1.0, np.float32(1.0) / np.float32(seen.norm)))
  assert seen.grad_scale == scale
  for leaf in leaves:
    hyper = ours.layout.model.groups[leaf.group]
    scalars = adam_scalars(hyper, number)
    old = [before[f"{leaf.name} {kind}"] for kind in ("master", "mu", "nu")]
    new = [after[f"{leaf.name} {kind}"] for kind in ("master", "mu", "nu")]
    grad = seen.grads[leaf.name]
    twin = adamw_float32(*old, grad, scalars=scalars, grad_scale=scale)
    for ours_, theirs in zip(new, twin, strict=False):
      assert ours_.tobytes() == theirs.tobytes(), leaf.name
    wide = grad.astype(np.float32) * scale
    adam = optax.scale_by_adam(b1=hyper.b1, b2=hyper.b2, eps=hyper.eps)
    state = optax.ScaleByAdamState(
      count=jnp.int32(number), mu=jnp.array(old[1]), nu=jnp.array(old[2])
    )
    direction, _ = adam.update(jnp.array(wide), state)
    lr = float(hyper.learning_rate(number))
    direction = np.asarray(direction, np.float64)
    decay = hyper.weight_decay * old[0]
    expected = old[0] - lr * (direction + decay)
    # mu is a sum of two terms that may cancel: its error is one of the terms.
    terms = hyper.b1 * np.abs(old[1]) + (1 - hyper.b1) * np.abs(wide)
    per_mu = direction / np.where(new[1] == 0, 1, new[1])
    bound = 1e-5 * lr * (np.abs(per_mu) * terms + np.abs(decay))
    bound += 2 * np.spacing(np.maximum(np.abs(old[0]), np.abs(new[0])))
    assert np.all(np.abs(new[0] - expected) <= bound), leaf.name
