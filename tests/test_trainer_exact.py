"""Whole runs against plain jax + optax, and against each other bit for bit."""

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
  assert_same_bits,
  batches,
  config,
  optimizer,
  record,
  small_gpt,
  state_of,
  trainer,
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_teacher_forced_gradients_and_updates_match_optax(precision, weights):
  """Both sides start each of 30 steps from the Trainer's state.

  Gradients: every element comes out of sums of at most `length` rounded terms,
  so that it is off by at most length * eps of its leaf's largest element: a
  bound that a missing or doubled term breaks. bfloat16 rounds activations too,
  whose errors add up like a random walk: sqrt(length).
  """
  ours = trainer(dict(weights=weights), precision=precision)
  leaves = ours.layout.model.leaves
  steps = record(ours)
  theirs = Loop(small_gpt(), optax_adamw(), config(precision=precision))
  hidden, blocks = 64, 2
  length = 4 * SEQ_LEN + blocks * (12 * hidden + 2 * SEQ_LEN) + hidden
  slack = length if precision == "fp32" else np.sqrt(length)
  before = state_of(ours)
  for number, batch in enumerate(batches(30)):
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


@pytest.mark.parametrize("variant", ["one_jit", "two_jits"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_free_running_losses_match_plain_optax(variant, accumulation):
  ours = trainer(accumulation=accumulation)
  theirs = Loop(
    small_gpt(),
    optax_adamw(),
    config(accumulation=accumulation),
    variant=variant,
  )
  for batch in batches(30, rows=4 * accumulation):
    loss = float(theirs.step(batch))
    assert ours.step(batch).loss == pytest.approx(loss, rel=1e-5)


def large_enough_to_cut():
  """A table of 2 MiB and blocks of 3 MiB: 1 MiB buckets cut both."""
  return small_gpt(vocab_size=2048, hidden_dim=256)


def run(plan, *, model=large_enough_to_cut, num_steps=10, **changes):
  ours = trainer(plan, model=model(), **changes)
  metrics = [ours.step(batch) for batch in batches(num_steps)]
  outcome = {
    "loss": np.array([m.loss for m in metrics]),
    "grad_norm": np.array([m.grad_norm for m in metrics]),
    **state_of(ours),
  }
  ours.close()
  return outcome


@pytest.fixture(scope="module")
def straight():
  """Ten steps with 64 MiB buckets, weight-stationary, two threads."""
  return run({"pool_threads": 2})


@pytest.mark.parametrize(
  "plan",
  [
    {"bucket_bytes": 1 << 20},
    {"pool_threads": 1},
    {"weights": "flow"},
    {"weights": "flow", "bucket_bytes": 1 << 20, "flow_window": 3},
    {"ring_slots": 1, "bucket_bytes": 1 << 20},
  ],
  ids=str,
)
def test_ten_steps_have_the_same_bits_under_every_plan(straight, plan):
  assert_same_bits(run(plan), straight)


@pytest.mark.parametrize(
  "plan",
  [
    {"grad_cast": "device"},
    {"weight_cast": "device"},
    {"weights": "flow", "weight_cast": "device", "grad_cast": "device"},
    {"weights": "flow", "bucket_bytes": 1 << 20},
  ],
  ids=str,
)
def test_the_side_that_casts_does_not_change_a_bit(plan):
  straight = run({}, num_steps=4, precision="bf16", accumulation=1)
  assert_same_bits(run(plan, num_steps=4, precision="bf16"), straight)


@pytest.mark.parametrize(
  "plan",
  [{}, {"bucket_bytes": 1 << 20}, {"weights": "flow"}],
  ids=str,
)
def test_resuming_at_step_5_has_the_same_bits(straight, tmp_path, plan):
  first = trainer(model=large_enough_to_cut())
  data = batches(10)
  for batch in data[:5]:
    first.step(batch)
  first.save(tmp_path)
  first.close()
  second = trainer(plan, model=large_enough_to_cut())
  second.step(data[7])  # what it has seen before must not matter
  second.restore(tmp_path)
  for batch in data[5:]:
    second.step(batch)
  resumed = state_of(second)
  assert_same_bits(resumed, {name: straight[name] for name in resumed})
