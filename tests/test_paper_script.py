"""The paper beside simulation: its parts by hand, its claims as slow tests."""

import dataclasses

import pytest

from experiments.paper import ablation as paper_ablation
from experiments.paper import published, ulysses
from experiments.paper import scale as paper_scale
from experiments.paper.constants import PREDICTION, SENSITIVITY, SOURCES
from sojax.models import presets


def test_every_constant_has_a_source():
  names = {field.name for field in dataclasses.fields(PREDICTION)}
  assert names <= set(SOURCES)


@pytest.mark.parametrize("what", SENSITIVITY)
def test_a_figure_that_is_changed_by_nothing_is_the_machines(what):
  assert PREDICTION.changed(what, 1.0) == (PREDICTION, PREDICTION.machine(1))


def test_figures_are_changed_by_their_factor():
  base = PREDICTION.machine(1)
  _, slow = PREDICTION.changed("link", 0.5)
  assert slow.d2h.at(1e9) == base.d2h.at(1e9) / 2
  constants, half = PREDICTION.changed("host", 0.5)
  assert half.host_rates["step"].at(72) == base.host_rates["step"].at(72) / 2
  assert half.host_bandwidth == base.host_bandwidth / 2
  assert constants.grace_s_per_param == 2 * PREDICTION.grace_s_per_param
  _, worse = PREDICTION.changed("efficiency", 0.5)
  assert worse.efficiency.at(1e12) == base.efficiency.at(1e12) / 2
  assert PREDICTION.changed("dispatch", 2)[1].dispatch_s == 2 * base.dispatch_s


def test_nodes_are_joined_by_slower_links():
  within, between = PREDICTION.machine(4), PREDICTION.machine(16)
  assert within.network_bandwidth == PREDICTION.machine(1).network_bandwidth
  assert between.network_bandwidth < within.network_bandwidth / 10


def test_ratios_are_of_what_both_systems_fit():
  rows = [
    {"system": system, "model": model, "ranks": ranks, "tflops": tflops}
    for system, model, ranks, tflops in (
      ("a", "1b", 1, 100.0),
      ("b", "1b", 1, 50.0),
      ("a", "5b", 1, 80.0),
      ("b", "5b", 1, None),
      ("a", "1b", 4, 90.0),
      ("b", "1b", 4, 30.0),
    )
  ]
  assert paper_scale.ratios(rows, "a", "b", 1) == {"1b": 2.0}
  assert paper_scale.ratios(rows, "a", "b", 4) == {"1b": 3.0}


def test_rows_tell_how_far_off_a_gain_is():
  gains = [0.2, 0.1, 0.45, 0.141]
  row, *_, last = paper_ablation.ablation_rows(gains, gains, gains)
  assert row["name"] == "GraceAdam" and row["paper_gain"] == 0.104
  assert row["predicted_error_points"] == pytest.approx(9.6)
  assert row["fitted_error_share"] == pytest.approx(0.2 / 0.104 - 1)
  assert last["predicted_error_points"] == 0


def test_a_long_sequence_takes_device_memory_in_proportion():
  method = ulysses.METHODS[0]
  shape = presets.gpt("1b")
  small, large = (
    ulysses.device_bytes(method, "1b", tokens, 4) for tokens in (4096, 8192)
  )
  # Of 1024 positions: the inputs of 21 stages, four arrays while heads are
  # exchanged, and what a block keeps, which is 16 of them and a little.
  per_token = (large - small) / 1024 / (2 * shape.hidden_dim)
  assert 21 + 4 + 16 < per_token < 21 + 4 + 18
  states = 2 * small - large
  assert states > 16 * presets.num_params(shape) / 4


def test_the_longest_sequence_is_the_last_that_fits():
  machine = PREDICTION.machine(4)
  lengths = []
  for method in ulysses.METHODS:
    tokens = ulysses.longest(method, "1b", 4, machine)
    bound = 0.95 * machine.device_bytes
    assert ulysses.device_bytes(method, "1b", tokens, 4) <= bound
    assert ulysses.device_bytes(method, "1b", tokens + 4096, 4) > bound
    lengths.append(tokens)
  assert lengths == sorted(lengths)


@pytest.mark.slow
def test_predicted_gains_have_the_papers_order_and_no_constant_of_it():
  config = paper_scale.train_config(8, 1024)
  work = paper_scale.workload("5b", config, 1)
  seconds, gains = paper_ablation.gains(PREDICTION, work, config)
  wanted = [*published.ABLATION.values()]
  for ours, theirs in zip(gains, wanted, strict=True):
    assert ours == pytest.approx(theirs, abs=0.06)
  assert gains.index(max(gains)) == wanted.index(max(wanted))
  assert seconds[0] / seconds[-1] == pytest.approx(
    published.ABLATION_TOTAL, rel=0.1
  )


@pytest.mark.slow
def test_two_fitted_constants_bring_every_gain_within_15_percent():
  config = paper_scale.train_config(8, 1024)
  work = paper_scale.workload("5b", config, 1)
  fitted = paper_ablation.fit(PREDICTION, paper_ablation.FITTED, work, config)
  _, gains = paper_ablation.gains(fitted, work, config)
  for ours, theirs in zip(gains, published.ABLATION.values(), strict=True):
    assert ours == pytest.approx(theirs, rel=0.15)
