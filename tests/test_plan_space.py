"""Any plan: the same bits as the plainest one, or a refusal that costs nothing.

Oracle of the bits: a run of the plan that has no switch set but those which,
by docs/design.md, round gradients, updates or norms otherwise.
"""

import functools
import json
import tempfile
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from sojax.plan.plan import Plan
from sojax.plan.records import speculating_buckets
from tests.plan_space import (
  MODELS,
  VALUES,
  WRONG,
  Setting,
  any_switches,
  valid_plans,
)
from tests.speculating import let_all_run_ahead, spiking_batches
from tests.training import STARTS, assert_same_bits, state_of, watching

NUM_STEPS = 5
SPIKE, INFINITE, SAVED_AT = 1, 3, 2

SETTINGS = (
  Setting("bf16", 1, 1),
  Setting("bf16", 1, 2),
  Setting("fp32", 1, 1),
  Setting("bf16", 2, 1),
  Setting("fp16", 2, 2),
)

# An example takes seconds, and a failure need not wait for a smaller one.
QUICK = hypothesis.settings(
  phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
  suppress_health_check=list(hypothesis.HealthCheck),
)
SPACE = tuple(
  Setting(precision, accumulation, num_ranks, model)
  for precision in ("fp32", "bf16", "fp16")
  for accumulation in (1, 2)
  for num_ranks in (1, 2)
  for model in MODELS
)

few = hypothesis.settings(QUICK, max_examples=3)
some = hypothesis.settings(QUICK, max_examples=3)
many = hypothesis.settings(QUICK, max_examples=5)


def batches_of(setting):
  return spiking_batches(
    NUM_STEPS, spikes=[SPIKE], infinite=[INFINITE], rows=setting.rows
  )


def run(setting, plan, *, all_ahead=False) -> dict[str, Any]:
  """Trains; one step is clipped a thousandfold, one is skipped."""
  data = batches_of(setting)
  with pytest.MonkeyPatch.context() as patch, setting.trainer(plan) as ours:
    if all_ahead:
      let_all_run_ahead(ours, patch)
    metrics = [ours.step(batch) for batch in data]
    outcome = {
      "loss": np.array([m.loss for m in metrics]),
      "grad_norm": np.array([m.grad_norm for m in metrics]),
      "clip_scale": np.array([m.clip_scale for m in metrics]),
      "scale": np.array([m.loss_scale for m in metrics]),
      "skipped": np.array([m.skipped for m in metrics]),
      "evaluation": np.array(ours.evaluate(data[0])),
      **state_of(ours),
    }
    if all_ahead and ours.plan.speculate == "always":
      num_ahead = len(speculating_buckets(ours.layout, ours.plan))
      assert all(m.speculated == num_ahead for m in metrics)
      assert not num_ahead or metrics[SPIKE].redone
      assert not num_ahead or metrics[INFINITE].undone
  return outcome


@functools.cache
def plain_run(setting: Setting, switches: str) -> dict[str, Any]:
  """Returns the outcome of a plan that has only the switches that it must.

  Args:
    setting: what is trained.
    switches: the plan, as JSON, so that it can be a key.
  """
  outcome = run(setting, json.loads(switches))
  expected = [n == INFINITE for n in range(NUM_STEPS)]
  assert outcome["skipped"].tolist() == expected
  assert outcome["clip_scale"][SPIKE] < 0.1
  return outcome


def expected_run(setting, plan):
  return plain_run(setting, json.dumps(setting.plainest(plan)))


def check_same_bits(setting, data):
  plan = data.draw(valid_plans(setting), "plan")
  all_ahead = data.draw(st.booleans(), "all run ahead")
  ours = run(setting, plan, all_ahead=all_ahead)
  assert_same_bits(ours, expected_run(setting, plan))


def check_resuming(setting, data):
  before = data.draw(valid_plans(setting), "before")
  given = setting.plainest(before)
  after = data.draw(valid_plans(setting, given), "after")
  batches = batches_of(setting)
  with tempfile.TemporaryDirectory() as directory:
    with setting.trainer(before) as first:
      for batch in batches[:SAVED_AT]:
        first.step(batch)
      first.save(directory)
    with setting.trainer(after) as second:
      second.step(batches[-1])  # what it has seen before must not matter
      second.restore(directory)
      for batch in batches[SAVED_AT:]:
        second.step(batch)
      resumed = state_of(second)
  expected = expected_run(setting, before)
  assert_same_bits(resumed, {name: expected[name] for name in resumed})


@pytest.mark.parametrize("setting", SETTINGS[:2], ids=str)
@hypothesis.given(data=st.data())
@few
def test_any_plan_has_the_bits_of_the_plainest(setting, data):
  check_same_bits(setting, data)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@hypothesis.given(data=st.data())
@many
def test_many_plans_have_the_bits_of_the_plainest(setting, data):
  check_same_bits(setting, data)


@hypothesis.given(data=st.data())
@few
def test_any_plan_resumes_a_checkpoint_of_any_other(data):
  check_resuming(SETTINGS[1], data)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@hypothesis.given(data=st.data())
@some
def test_many_plans_resume_checkpoints_of_others(setting, data):
  check_resuming(setting, data)


def check_runs_or_is_refused(settings, data):
  setting = data.draw(st.sampled_from(settings), "setting")
  switches = data.draw(any_switches(), "switches")
  with watching() as taken:
    try:
      ours = setting.trainer(switches)
    except ValueError as error:
      hypothesis.event("refused")
      assert not taken
      assert any(name in str(error) for name in switches), error
      return
  hypothesis.event("runs")
  assert {*taken} >= {*STARTS}
  with ours:
    for batch in batches_of(setting)[:2]:
      ours.step(batch)
    assert ours.count == 2


@hypothesis.given(data=st.data())
@hypothesis.settings(QUICK, max_examples=8)
def test_any_plan_runs_or_is_refused_before_anything_is_taken(data):
  check_runs_or_is_refused([Setting("bf16", 1, 1)], data)


@pytest.mark.slow
@hypothesis.given(data=st.data())
@hypothesis.settings(QUICK, max_examples=20)
def test_many_plans_run_or_are_refused_before_anything_is_taken(data):
  check_runs_or_is_refused(SPACE, data)


@hypothesis.given(
  name=st.sampled_from([*VALUES, "numa_node", "no_switch", 3]), value=WRONG
)
@hypothesis.settings(QUICK, max_examples=400)
def test_a_wrong_value_of_a_switch_is_refused_by_its_name(name, value):
  try:
    plan = Plan.of({name: value})
  except ValueError as error:
    assert str(name) in str(error)
  else:
    assert getattr(plan, name) == value or isinstance(value, list)
