"""The plans of the ablation, and its rows for a tiny model."""

import json

import pytest
from absl.testing import flagsaver

from experiments import ablation
from experiments.ablation_plans import Sizes, techniques, variants
from sojax import models
from sojax.plan.machines import machine
from sojax.plan.plan import Plan

SIZES = Sizes(
  device_buckets=2,
  large_device_buckets=1,
  bucket_bytes=1 << 17,
  large_bucket_bytes=1 << 19,
  few_threads=1,
)
TINY = models.GPTConfig(
  vocab_size=256, num_layers=2, hidden_dim=128, num_heads=2, max_seq_len=1024
)


def is_on(plan: Plan, switches) -> bool:
  return all(getattr(plan, name) == value for name, value in switches.items())


def test_every_technique_is_off_in_turn_and_on_in_turn():
  known = techniques(SIZES)
  plans = {variant.name: variant.plan for variant in variants(SIZES)}
  assert len(plans) == len([*variants(SIZES)])
  for technique in known:
    on, others = technique.on, [x for x in known if x is not technique]
    assert is_on(plans["all"], on) and not is_on(plans["none"], on)
    assert not is_on(plans[f"all but {technique.name}"], on)
    if technique.name != "device buckets":
      assert is_on(plans[f"none but {technique.name}"], on)
    for other in others:
      assert not is_on(plans[f"none but {technique.name}"], other.on)
      if {other.name, technique.name} != {"device buckets", "small buckets"}:
        assert is_on(plans[f"all but {technique.name}"], other.on)
  assert plans["none but device buckets"].device_buckets == 1
  assert plans["all but small buckets"].device_buckets == 1


def test_what_speculation_does_not_go_with_gives_way():
  plans = {variant.name: variant.plan for variant in variants(SIZES)}
  assert plans["none"].grad_cast == "host_separate"
  assert plans["none but speculation"].grad_cast == "device"
  assert plans["all but casts"].weight_cast == "device"
  assert plans["all, with parked gradients"].speculation == "wait"


@pytest.mark.parametrize("executor", ["simulate", "paced"])
def test_the_script_writes_a_row_for_each_plan(
  executor, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(models.presets, "gpt", lambda name: TINY)
  monkeypatch.setattr(ablation, "_LARGE", SIZES)
  monkeypatch.setattr(
    ablation, "_SCALE", ablation.Scale(divisor=2, pool_threads=1)
  )
  path = tmp_path / "result.json"
  rows = [] if executor == "simulate" else ["--row=all", "--row=none"]
  with flagsaver.flagsaver():
    ablation.flags.FLAGS(
      [
        "ablation",
        f"--executor={executor}",
        f"--json={path}",
        f"--picture={path.with_suffix('.png')}",
        "--ablation_rounds=1",
        *rows,
      ]
    )
    ablation.main(["ablation"])
  result = json.loads(path.read_text())
  names = [row["name"] for row in result["rows"]]
  wanted = [variant.name for variant in variants(SIZES)]
  assert names == (wanted if executor == "simulate" else ["all", "none"])
  for row in result["rows"]:
    assert row["predicted_s"] >= 0.999 * row["lower_bound_s"] > 0
    assert 0 <= row["device_idle"] < 1
    assert ("measured_s" in row) == (executor == "paced")
    assert Plan.of(row["plan"]).bucket_bytes in (1 << 17, 1 << 19)
  assert path.with_suffix(".png").stat().st_size > 1000
  assert "all" in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_trains(tmp_path, monkeypatch):
  monkeypatch.setattr(models.presets, "gpt", lambda name: TINY)
  monkeypatch.setattr(ablation, "_SMALL", SIZES)
  monkeypatch.setattr(ablation, "measure_profile", lambda: machine("gh200"))
  path = tmp_path / "result.json"
  with flagsaver.flagsaver():
    ablation.flags.FLAGS(
      [
        "ablation",
        "--executor=jax",
        f"--json={path}",
        "--ablation_rounds=1",
        "--row=all",
        "--row=none",
      ]
    )
    ablation.main(["ablation"])
  for row in json.loads(path.read_text())["rows"]:
    assert row["measured_s"] > 0 and row["predicted_s"] > 0


def test_an_argument_that_is_no_flag_is_refused():
  with pytest.raises(ablation.app.UsageError, match="unexpected argument"):
    ablation.main(["ablation", "now"])
