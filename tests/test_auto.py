"""plan="auto": what is measured, kept and chosen, with little effort."""

import functools
import json
import math

import pytest

from experiments import train
from sojax import auto, trainer
from sojax.calibrate import Effort
from sojax.graph.timeline import Span, Timeline
from tests import training
from tests.training import batches, mesh_of

EFFORT = Effort(
  seconds=0.01,
  matrix_dims=(64, 128),
  transfer_bytes=(1 << 16, 1 << 18),
  device_bytes=1 << 20,
  host_elems=1 << 16,
  host_rounds=3,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp("measured")


@pytest.fixture
def little_effort(cache, monkeypatch):
  quick = functools.partial(auto.auto_plan, effort=EFFORT, cache=cache)
  monkeypatch.setattr(trainer, "auto_plan", quick)


@pytest.fixture
def nothing_measures(monkeypatch):
  def fail(*args, **kwargs):
    raise AssertionError("measured again")

  monkeypatch.setattr(auto, "measure_profile", fail)
  monkeypatch.setattr(auto, "measure_stages", fail)


def test_a_trainer_plans_trains_and_reports(little_effort):
  with training.trainer("auto") as ours:
    assert ours.plan == ours.auto.plan
    assert ours.auto.ranking.best.fits
    assert ours.auto.step_s > 0
    for batch in batches(4):
      ours.step(batch)
    ours.drain()
    report = ours.auto.report(ours.timeline())
    explanation = ours.auto.explain()
    figures = train.compare_step(ours)
  assert report.startswith(f"step: {ours.auto.step_s:.4f} s predicted, ")
  assert report.endswith(" %)")
  assert "limited by" in explanation
  assert figures["predicted_step_s"] == ours.auto.step_s
  assert f"{figures['measured_step_s']:.4f} s measured" in report


def test_a_trainer_with_a_plan_of_its_own_measures_nothing(nothing_measures):
  with training.trainer({}) as ours:
    assert ours.auto is None
    assert all(map(math.isnan, train.compare_step(ours).values()))


def test_what_was_measured_is_not_measured_again(
  little_effort, cache, request, monkeypatch
):
  with training.trainer("auto") as first:
    plan = first.plan
  before = sorted(path.name for path in cache.iterdir())
  request.getfixturevalue("nothing_measures")
  with training.trainer("auto") as second:
    assert second.plan == plan
  assert sorted(path.name for path in cache.iterdir()) == before


def test_another_batch_has_stages_of_its_own(little_effort, cache):
  with training.trainer("auto"):
    before = {*cache.iterdir()}
  with training.trainer("auto", micro_batch=2):
    new = {*cache.iterdir()} - before
  assert len(new) == 2
  assert all(path.name.startswith("stages-") for path in new)


def test_several_devices_share_the_host(little_effort, cache):
  with training.trainer("auto", mesh=mesh_of(2), micro_batch=2) as ours:
    problem = ours.auto.ranking.best.problem
  (path,) = cache.glob("machine-*.json")
  host_bytes = json.loads(path.read_text())["host_bytes"]
  assert problem.profile.host_bytes == host_bytes // 2
  assert problem.workload.num_ranks == 2


def test_a_profile_of_another_machine_is_refused(little_effort, cache):
  with training.trainer("auto"):
    pass
  (path,) = cache.glob("machine-*.json")
  text = path.read_text()
  profile = json.loads(text)
  profile["measured_on"]["cpu"] = "another"
  path.write_text(json.dumps(profile))
  try:
    with pytest.raises(ValueError, match="calibrate here"):
      training.trainer("auto")
  finally:
    path.write_text(text)


@pytest.mark.parametrize(
  "text",
  [
    "",
    "[]",
    "{}",
    '{"forward": 1, "backward": 1}',
    '{"forward": [1, 1, 1], "backward": [1, 1, 1]}',
    '{"forward": [1, 1, 1, 1], "backward": [1, 1, 1, -1]}',
    '{"forward": [1, 1, 1, "1"], "backward": [1, 1, 1, 1]}',
    '{"forward": [1, 1, 1, 1], "backward": [1, 1, 1, NaN]}',
  ],
)
def test_damaged_seconds_of_stages_are_named_by_their_file(
  little_effort, cache, text
):
  with training.trainer("auto"):
    pass
  before = {path: path.read_text() for path in cache.glob("stages-*.json")}
  for path in before:
    path.write_text(text)
  try:
    with pytest.raises(ValueError, match=r"stages-\w+\.json does not hold"):
      training.trainer("auto")
  finally:
    for path, old in before.items():
      path.write_text(old)


def test_steps_are_timed_between_validates_but_for_the_first():
  ends_s = (1.0, 11.0, 13.0, 16.0, 18.0)
  spans = [
    Span("validate", "device", step, end_s - 0.5, end_s)
    for step, end_s in enumerate(ends_s)
  ]
  spans.append(Span("forward stage=0", "device", 4, 16.0, 17.0))
  assert auto.step_seconds(Timeline(spans)) == 2.0
  assert auto.step_seconds(Timeline(spans[:2])) is None
