"""The built-in machines: all there, sourced, and in a sane relation.

Figures that vendors publish are the oracle of bounds; no machine is faster than
its data sheet.
"""

import dataclasses
import json

import pytest

from sojax.plan.hardware import HOST_OPERATIONS, HardwareProfile
from sojax.plan.machines import MACHINES, machine

_NAMES = (
  "gh200",
  "gh200-96",
  "gh200-144",
  "gb200",
  "mi300a",
  "h100-pcie",
  "h200-pcie",
  "a100-pcie",
)
_UNSOURCED = {"name", "device_is_host", "sources", "measured_on"}
_CURVES = ("efficiency", "d2h", "h2d", "d2h_pageable", "h2d_pageable")


def test_the_machines_are_those_that_are_promised():
  assert set(MACHINES) == set(_NAMES)
  assert machine("gh200") is machine("gh200-96")
  assert all(MACHINES[name].name == name for name in _NAMES[1:])


def test_an_unknown_machine_is_answered_with_the_known_ones():
  with pytest.raises(ValueError, match="'tpu'.*'gh200'.*'a100-pcie'"):
    machine("tpu")


@pytest.mark.parametrize("name", _NAMES)
def test_every_figure_has_a_source(name):
  fields = {x.name for x in dataclasses.fields(HardwareProfile)} - _UNSOURCED
  sources = machine(name).sources
  assert set(sources) == fields
  assert all(len(text) > 10 for text in sources.values())


@pytest.mark.parametrize("name", _NAMES)
def test_machines_survive_json(name):
  text = json.dumps(machine(name).to_json(), allow_nan=False)
  assert HardwareProfile.from_json(json.loads(text)) == machine(name)


@pytest.mark.parametrize("name", _NAMES)
def test_curves_rise_with_size(name):
  profile = machine(name)
  curves = [getattr(profile, x) for x in _CURVES]
  for curve in (*curves, *profile.host_rates.values()):
    values = [value for _, value in curve.points]
    assert values == sorted(values)


@pytest.mark.parametrize("name", _NAMES)
def test_no_operation_is_faster_than_the_memory_or_than_a_plain_step(name):
  profile = machine(name)
  best = {x: profile.host_rates[x].at(1e6) for x in HOST_OPERATIONS}
  assert max(best.values()) == best["step"] < profile.host_bandwidth
  assert best["record3"] < best["record2"] < best["redo"] < best["step"]
  # Cores are there for it, and one alone is not enough.
  assert profile.host_rates["step"].points[-1][0] <= profile.host_cores
  one = profile.host_rates["step"].at(1)
  assert one < best["step"] / 4
  assert profile.host_rates["step"].at(2) == pytest.approx(2 * one)
  for operation in HOST_OPERATIONS:
    of_one = profile.host_rates[operation].at(1) / one
    assert of_one == pytest.approx(best[operation] / best["step"])


# Peaks of data sheets: bfloat16 FLOP/s, device bytes/s, link bytes/s.
_PEAKS = {
  "gh200-96": (990e12, 4.0e12, 450e9),
  "gh200-144": (990e12, 4.9e12, 450e9),
  "gb200": (2.5e15, 8.0e12, 450e9),
  "mi300a": (981e12, 5.3e12, 5.3e12 / 2),
  "h100-pcie": (757e12, 2.0e12, 64e9),
  "h200-pcie": (990e12, 4.8e12, 64e9),
  "a100-pcie": (312e12, 1.94e12, 32e9),
}


@pytest.mark.parametrize("name", _PEAKS)
def test_no_machine_is_faster_than_its_data_sheet(name):
  profile, (flops, memory, link) = machine(name), _PEAKS[name]
  assert 0.95 * flops < profile.device_flops["bfloat16"] <= flops
  assert 0.6 * memory < profile.device_bandwidth < memory
  for curve in (profile.d2h, profile.h2d):
    assert 0.35 * link < curve.at(1e12) < link
  for pinned, pageable in (
    (profile.d2h, profile.d2h_pageable),
    (profile.h2d, profile.h2d_pageable),
  ):
    assert pageable.at(1e9) <= pinned.at(1e9)


def test_a_gb200_has_half_a_grace():
  whole, half = machine("gh200"), machine("gb200")
  for name in ("host_bytes", "host_bandwidth", "host_cores"):
    assert getattr(half, name) == getattr(whole, name) / 2
  for operation in HOST_OPERATIONS:
    rates = half.host_rates[operation], whole.host_rates[operation]
    assert rates[0].at(1) == rates[1].at(1)
    assert rates[0].at(36) == pytest.approx(rates[1].at(72) / 2)


def test_an_mi300a_divides_its_memory():
  profile = machine("mi300a")
  assert profile.device_bytes + profile.host_bytes == 128e9


def test_a_step_on_a_grace_lies_between_the_published_one_and_the_bound():
  seconds = 28e9 / machine("gh200").host_rates["step"].at(72)
  assert 28e9 / 486e9 < seconds < 0.082
