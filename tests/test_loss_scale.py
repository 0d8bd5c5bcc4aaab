"""fp16: the loss scale's rule, its place in checkpoints, and exact skips."""

import dataclasses

import jax
import numpy as np
import pytest

import sojax
from sojax.plan.config import LossScale
from tests.training import (
  assert_same_bits,
  batches,
  config,
  state_of,
  trainer,
)


def rule(history, scale):
  """Oracle: the scales of steps that were finite or not, one by one."""
  value, good, scales = scale.initial, 0, []
  for finite in history:
    scales.append(value)
    good = good + 1 if finite else 0
    if not finite:
      value = max(1.0, value * scale.backoff_factor)
    elif good == scale.growth_interval:
      value, good = min(2.0**24, value * scale.growth_factor), 0
  return scales


@pytest.mark.parametrize(
  "plan",
  [
    {},
    {"device_buckets": 2, "bucket_bytes": 1 << 16},
    {"weights": "flow", "grad_cast": "device", "weight_cast": "device"},
  ],
  ids=str,
)
def test_overflows_leave_no_trace_and_the_scale_follows_its_rule(plan):
  """300 steps; the twin never sees the overflowing batches.

  It is given the scale of each step: a power of two, which changes no bit
  unless a value leaves fp16's range.
  """
  scale = LossScale(initial=2.0**24, growth_interval=7)
  data = batches(300)
  with trainer(plan, precision="fp16", loss_scale=scale) as ours:
    metrics = [ours.step(batch) for batch in data]
    history = [not m.skipped for m in metrics]
    scales = [m.loss_scale for m in metrics]
    expected = state_of(ours)
  assert 8 < history.count(False) < 150
  assert scales == rule(history, scale)
  assert min(scales) < max(scales[100:]), "it never grew back"
  with trainer(plan, precision="fp16", loss_scale=scale) as theirs:
    for batch, finite, value in zip(data, history, scales, strict=True):
      if finite:
        theirs._state.scale = dataclasses.replace(
          theirs._state.scale,
          scale=jax.device_put(
            np.float32(value), theirs._setup.placement.device
          ),
        )
        assert not theirs.step(batch).skipped
    found = state_of(theirs)
  assert found["count"] == history.count(True)
  for counter in ("num_steps", "loss_scale", "good_steps"):
    del found[counter], expected[counter]
  assert_same_bits(found, expected)


def test_the_update_sees_unscaled_gradients():
  """Norm and update do not depend on the scale, a power of two."""
  states = []
  for initial in (2.0**8, 2.0**14):
    scale = LossScale(initial=initial)
    with trainer(precision="fp16", loss_scale=scale, clip_norm=None) as ours:
      metrics = [ours.step(batch) for batch in batches(3)]
      norms = [m.grad_norm for m in metrics]
      state = state_of(ours)
      states.append((norms, state))
  (norms, state), (other_norms, other_state) = states
  with trainer(precision="fp32", clip_norm=None) as plain:
    exact = [plain.step(batch).grad_norm for batch in batches(3)]
  # fp16 rounds to 11 bits; what the scale changes are subnormal gradients.
  assert norms == pytest.approx(exact, rel=0.02)
  assert other_norms == pytest.approx(norms, rel=0.01)
  for name in state:
    if name.endswith("nu"):
      # nu holds squares of gradients: 64 times apart if they were not divided.
      largest = state[name].max()
      assert other_state[name].max() == pytest.approx(largest, rel=0.1)


def test_the_scale_is_resumed(tmp_path):
  scale = LossScale(initial=2.0**24, growth_interval=3)
  data = batches(24)
  with trainer(precision="fp16", loss_scale=scale) as ours:
    for batch in data[:12]:
      ours.step(batch)
    ours.save(tmp_path)
    for batch in data[12:]:
      ours.step(batch)
    expected = state_of(ours)
  with trainer(precision="fp16", loss_scale=scale) as resumed:
    resumed.restore(tmp_path)
    for batch in data[12:]:
      resumed.step(batch)
    assert_same_bits(state_of(resumed), expected)


def test_a_checkpoint_of_another_precision_starts_the_scale_anew(tmp_path):
  with trainer(precision="bf16") as theirs:
    theirs.step(batches(1)[0])
    theirs.save(tmp_path)
  with trainer(precision="fp16") as ours:
    ours.restore(tmp_path)
    assert ours.step(batches(1)[0]).loss_scale == LossScale().initial
    path = ours.save(tmp_path)
  with trainer(precision="bf16") as theirs:
    theirs.restore(path)
    assert theirs.step(batches(1)[0]).loss_scale == 1.0


def inf_mask(batch):
  mask = np.ones((4, batch["tokens"].shape[1] - 1), np.float32)
  mask[0, 0] = np.inf
  return batch | {"loss_mask": mask}


def test_too_many_skips_in_a_row_stop_training_and_lose_nothing():
  good, *bad = batches(5)
  bad = [inf_mask(batch) for batch in bad]
  with trainer(max_consecutive_skips=3) as ours:
    ours.step(bad[0])
    ours.step(bad[1])
    assert not ours.step(good).skipped  # starts the count anew
    before = state_of(ours)
    assert ours.step(bad[0]).skipped and ours.step(bad[1]).skipped
    metrics = ours.step(bad[2])
    with pytest.raises(sojax.StepError) as caught:
      _ = metrics.skipped
    with pytest.raises(sojax.StepError):
      ours.drain()
    assert caught.value.intact
    assert "3 steps in a row" in str(caught.value.__cause__)
    after = state_of(ours)
    assert after.pop("num_steps") == before.pop("num_steps") + 2
    assert_same_bits(after, before)


def test_a_restore_counts_skips_in_a_row_anew(tmp_path):
  good, *bad = batches(5)
  bad = [inf_mask(batch) for batch in bad]
  with trainer(max_consecutive_skips=3) as ours:
    ours.step(good)
    ours.save(tmp_path)
    for _ in range(2):
      assert ours.step(bad[0]).skipped and ours.step(bad[1]).skipped
      ours.restore(tmp_path)


def test_an_overflow_at_scale_1_stops_training():
  scale = LossScale(initial=1.0)
  with trainer(precision="fp16", loss_scale=scale) as ours:
    ours.step(inf_mask(batches(1)[0]))
    with pytest.raises(sojax.StepError) as caught:
      ours.drain()
    assert "at loss scale 1" in str(caught.value.__cause__)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"initial": 3.0}, "initial=3.0 must be a power of two"),
    ({"initial": 0.5}, "initial=0.5 must be a power of two in"),
    ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
    ({"growth_factor": 1.0}, "growth_factor=1.0"),
    ({"growth_interval": 0}, "growth_interval=0"),
  ],
)
def test_a_wrong_scale_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    config(precision="fp16", loss_scale=LossScale(**fields))
