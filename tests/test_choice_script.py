"""The experiment that measures the planner's choice, without its steps."""

import pytest

from experiments import choice
from sojax.plan.hardware import HOST_OPERATIONS
from sojax.plan.machines import machine
from sojax.planner.evaluate import Evaluator

RATES = {name: 1e9 * (i + 1) for i, name in enumerate(HOST_OPERATIONS)}


def test_the_host_is_this_one_and_the_machine_as_fast_beside_it():
  """A fourth of a bucket at a rate takes as long as all of it at four times."""
  profile = machine("gh200")
  given = choice.problem(profile, RATES, 1e-4)
  for name, rate in RATES.items():
    assert given.profile.host_rates[name].at(1) == 4 * rate
  there = profile.host_rates["step"].at(profile.host_cores)
  slowness = there / (4 * RATES["step"])
  assert given.profile.d2h.at(1e6) == pytest.approx(
    profile.d2h.at(1e6) / slowness
  )
  assert given.profile.device_flops["bfloat16"] == pytest.approx(
    profile.device_flops["bfloat16"] / slowness
  )


def test_named_plans_differ_in_what_limits_them_and_most_fit():
  given = choice.problem(machine("h200-pcie"), RATES, 1e-4)
  fitting = dict(choice._fitting(given))
  assert len(fitting) >= 8
  evaluate = Evaluator(given)
  left_out = {*choice._PLANS} - {*fitting}
  assert left_out
  for name in left_out:
    assert not evaluate(given.plan(choice._PLANS[name])).fits
