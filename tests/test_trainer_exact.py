"""Whole runs against plain jax + optax, and against each other bit for bit."""

import numpy as np
import pytest

from sojax.reference.loop import Loop
from tests.exactness import check_teacher_forced, optax_adamw
from tests.training import (
  assert_same_bits,
  batches,
  config,
  small_gpt,
  state_of,
  trainer,
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_teacher_forced_gradients_and_updates_match_optax(precision, weights):
  ours = trainer(dict(weights=weights), precision=precision)
  theirs = Loop(small_gpt(), optax_adamw(), config(precision=precision))
  check_teacher_forced(ours, theirs)


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
