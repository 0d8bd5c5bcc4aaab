"""Profiles: what they refuse, and what becomes of them in a file.

The oracle is the docstring: hand-worked curves, and profiles whose figures are
all different from each other.
"""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojax.plan.hardware import (
  HOST_OPERATIONS,
  Curve,
  HardwareProfile,
  Resource,
)


def make_profile(**changes) -> HardwareProfile:
  """A machine of which no two figures are the same."""
  figures = dict(
    name="bench",
    device_flops={"float32": 1e12, "bfloat16": 2e12},
    efficiency=Curve(((1e6, 0.1), (1e9, 0.9))),
    device_bytes=10_000,
    device_bandwidth=3e11,
    d2h=Curve(((1e3, 4e9), (1e6, 5e10))),
    h2d=Curve.flat(6e10),
    d2h_pageable=Curve.flat(7e9),
    h2d_pageable=Curve.flat(8e9),
    host_bytes=90_000,
    host_bandwidth=1.1e11,
    host_cores=12,
    host_rates={
      operation: Curve(((1.0, 1e10 + i), (12.0, 1e11 + i)))
      for i, operation in enumerate(HOST_OPERATIONS)
    },
    dispatch_s=13e-6,
    network_bandwidth=14e9,
    host_task_s=2e-4,
    network_latency_s=15e-6,
    sources={"d2h": "a guess"},
    measured_on={"cpu": "abacus"},
  )
  return HardwareProfile(**{**figures, **changes})


@st.composite
def _curves(draw, top=1e18):
  sizes = draw(
    st.lists(st.floats(1e-3, 1e18), min_size=1, max_size=4, unique=True)
  )
  values = [draw(st.floats(1e-6, top)) for _ in sizes]
  return Curve(tuple(zip(sorted(sizes), values, strict=True)))


@given(d2h=_curves(), efficiency=_curves(top=1.0), seconds=st.floats(0, 10))
def test_json_text_gives_the_same_profile(d2h, efficiency, seconds):
  profile = make_profile(d2h=d2h, efficiency=efficiency, dispatch_s=seconds)
  text = json.dumps(profile.to_json(), allow_nan=False)
  assert HardwareProfile.from_json(json.loads(text)) == profile


def test_a_saved_profile_is_loaded(tmp_path):
  profile = make_profile(device_is_host=True)
  profile.save(tmp_path / "profile.json")
  assert HardwareProfile.load(tmp_path / "profile.json") == profile


def test_what_has_a_default_may_be_left_out_of_the_json():
  values = make_profile().to_json()
  for name in ("device_is_host", "sources", "measured_on"):
    del values[name]
  profile = HardwareProfile.from_json(values)
  assert not profile.device_is_host
  assert profile.sources == profile.measured_on == {}


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"profile"', "\x00"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
  path = tmp_path / "profile.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=r"profile\.json"):
    HardwareProfile.load(path)


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"device_bytes": -1}, "device_bytes=-1"),
    ({"host_bandwidth": "fast"}, "host_bandwidth='fast'"),
    ({"d2h": [[1.0, -2.0]]}, "d2h"),
    ({"weather": 1}, "'weather'"),
  ],
)
def test_a_wrong_figure_in_a_file_is_named_with_the_file(
  tmp_path, change, said
):
  path = tmp_path / "profile.json"
  path.write_text(json.dumps({**make_profile().to_json(), **change}))
  with pytest.raises(ValueError, match=rf"profile\.json: .*{said}"):
    HardwareProfile.load(path)


@pytest.mark.parametrize(
  "name",
  [
    field.name
    for field in dataclasses.fields(HardwareProfile)
    if field.name not in ("device_is_host", "sources", "measured_on")
  ],
)
def test_a_missing_attribute_is_named(name):
  values = make_profile().to_json()
  del values[name]
  with pytest.raises(ValueError, match=f"has no .*'{name}'"):
    HardwareProfile.from_json(values)


def test_an_unknown_attribute_is_named():
  values = {**make_profile().to_json(), "colour": "blue"}
  with pytest.raises(ValueError, match="'colour'"):
    HardwareProfile.from_json(values)


_NUMBERS = (
  "device_bytes",
  "device_bandwidth",
  "host_bytes",
  "host_bandwidth",
  "host_cores",
  "dispatch_s",
  "host_task_s",
  "network_bandwidth",
  "network_latency_s",
)


@pytest.mark.parametrize("name", _NUMBERS)
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "7", None, True, []])
def test_a_figure_that_is_no_positive_number_is_named(name, value):
  values = {**make_profile().to_json(), name: value}
  with pytest.raises(ValueError, match=name):
    HardwareProfile.from_json(values)


def test_only_seconds_may_be_zero():
  for name in _NUMBERS:
    if name.endswith("_s"):
      make_profile(**{name: 0.0})
    else:
      with pytest.raises(ValueError, match=f"{name}=0 must be positive"):
        make_profile(**{name: 0})


def test_counts_must_be_integers():
  for name in ("device_bytes", "host_bytes", "host_cores"):
    with pytest.raises(ValueError, match=f"{name}=1.5 must be an integer"):
      make_profile(**{name: 1.5})


_CURVES = ("efficiency", "d2h", "h2d", "d2h_pageable", "h2d_pageable")


@pytest.mark.parametrize("name", _CURVES)
@pytest.mark.parametrize(
  "points",
  [
    [],
    3.0,
    "12",
    {"1": 1},
    [1.0],
    [[1.0]],
    [[1.0, 0.5, 0.5]],
    [["1", 0.5]],
    [[1.0, True]],
    [[1.0, -0.5]],
    [[1.0, math.nan]],
    [[2.0, 0.5], [1.0, 0.5]],
    [[1.0, 0.5], [1.0, 0.6]],
  ],
)
def test_a_curve_that_is_none_is_named(name, points):
  with pytest.raises(ValueError, match=name):
    HardwareProfile.from_json({**make_profile().to_json(), name: points})


def test_a_host_operation_without_a_rate_is_named():
  for operation in HOST_OPERATIONS:
    rates = dict(make_profile().host_rates)
    del rates[operation]
    with pytest.raises(ValueError, match=f"host_rates has no .*'{operation}'"):
      make_profile(host_rates=rates)


def test_an_unknown_host_operation_is_named():
  rates = {**make_profile().host_rates, "dance": Curve.flat(1.0)}
  with pytest.raises(ValueError, match="host_rates has .*'dance'"):
    make_profile(host_rates=rates)


@pytest.mark.parametrize(
  ("flops", "said"),
  [
    ({}, "device_flops"),
    ({"float8": 1e12}, "float8"),
    ({"float32": -1.0}, r"device_flops\['float32'\]=-1.0"),
    ({"float32": "fast"}, r"device_flops\['float32'\]='fast'"),
  ],
)
def test_flops_of_unknown_dtypes_and_no_flops_are_refused(flops, said):
  with pytest.raises(ValueError, match=said):
    make_profile(device_flops=flops)


def test_no_program_reaches_more_than_the_peak():
  with pytest.raises(ValueError, match="efficiency=1.01 at 3.0 FLOPs"):
    make_profile(efficiency=Curve(((3.0, 1.01),)))


def test_texts_are_checked():
  for name in ("sources", "measured_on"):
    for value in ("a text", {"d2h": 3}):
      values = {**make_profile().to_json(), name: value}
      with pytest.raises(ValueError, match=name):
        HardwareProfile.from_json(values)
  for change in ({"name": 3}, {"device_is_host": "no"}, {"device_flops": 3}):
    with pytest.raises(ValueError, match=next(iter(change))):
      HardwareProfile.from_json({**make_profile().to_json(), **change})
  with pytest.raises(ValueError, match="'weather'"):
    make_profile(sources={"weather": "the window"})


def test_on_a_slowed_machine_everything_takes_longer():
  fast = make_profile()
  slow = fast.slowed(4.0)
  assert slow.device_flops == {"float32": 2.5e11, "bfloat16": 5e11}
  assert slow.efficiency == fast.efficiency
  for name in ("device_bandwidth", "host_bandwidth", "network_bandwidth"):
    assert getattr(slow, name) == getattr(fast, name) / 4
  for name in ("dispatch_s", "host_task_s", "network_latency_s"):
    assert getattr(slow, name) == getattr(fast, name) * 4
  for size in (1.0, 1e4, 1e9):
    for name in ("d2h", "h2d", "d2h_pageable", "h2d_pageable"):
      at = getattr(fast, name).at(size) / 4
      assert getattr(slow, name).at(size) == pytest.approx(at, rel=1e-12)
    for operation in HOST_OPERATIONS:
      at = fast.host_rates[operation].at(size) / 4
      assert slow.host_rates[operation].at(size) == pytest.approx(at, rel=1e-12)
  same = ("device_bytes", "host_bytes", "host_cores", "measured_on", "sources")
  assert all(getattr(slow, x) == getattr(fast, x) for x in same)
  assert slow.name != fast.name


def test_a_factor_must_be_positive():
  for factor in (0, -2.0, math.nan, math.inf):
    with pytest.raises(ValueError, match="factor="):
      make_profile().slowed(factor)


def test_with_another_host_only_the_host_changes():
  device = make_profile(sources={"d2h": "a", "host_cores": "b"})
  host = make_profile(
    name="other",
    device_bytes=1,
    d2h=Curve.flat(1.0),
    host_bytes=2,
    host_bandwidth=3.0,
    host_cores=4,
    host_rates={x: Curve.flat(5.0) for x in HOST_OPERATIONS},
    dispatch_s=6.0,
    host_task_s=8.0,
    network_latency_s=7.0,
    device_is_host=True,
    sources={"d2h": "c", "host_cores": "d"},
    measured_on={"cpu": "other"},
  )
  both = device.with_host_of(host)
  of_host = (
    "host_bytes",
    "host_bandwidth",
    "host_cores",
    "host_rates",
    "dispatch_s",
    "host_task_s",
    "measured_on",
  )
  for field in dataclasses.fields(HardwareProfile):
    if field.name not in ("name", "sources"):
      source = host if field.name in of_host else device
      assert getattr(both, field.name) == getattr(source, field.name)
  assert both.sources == {"d2h": "a", "host_cores": "d"}


def test_a_profile_of_another_machine_is_refused():
  profile = make_profile()
  profile.check_measured_on({"cpu": "abacus"})
  for machine in ({"cpu": "slide rule"}, {}, {"cpu": "abacus", "cores": "1"}):
    with pytest.raises(ValueError, match="abacus.*calibrate here"):
      profile.check_measured_on(machine)


def test_cores_are_shared_where_programs_run_on_the_host():
  assert make_profile().capacities == {
    Resource.HOST_MEMORY: 1.1e11,
    Resource.DEVICE_MEMORY: 3e11,
  }
  of_cpu = make_profile(device_is_host=True).capacities
  assert of_cpu[Resource.HOST_CORES] == 12.0


def test_a_curve_is_linear_in_the_logarithm_and_constant_outside():
  curve = Curve(((10.0, 1.0), (1000.0, 3.0), (10000.0, 2.0)))
  sizes = (1.0, 10.0, 100.0, 1000.0, 10**3.5, 1e4, 1e9)
  values = [curve.at(size) for size in sizes]
  assert values == pytest.approx([1.0, 1.0, 2.0, 3.0, 2.5, 2.0, 2.0])
