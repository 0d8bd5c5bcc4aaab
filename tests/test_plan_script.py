"""The script that plans, as a user runs it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sojax.models import presets
from sojax.plan.machines import machine

_ROOT = Path(__file__).parents[1]


def run(*flags):
  command = [sys.executable, "-m", "experiments.plan", *flags]
  return subprocess.run(
    command, cwd=_ROOT, capture_output=True, text=True, check=False
  )


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
  path = tmp_path_factory.mktemp("plan") / "result.json"
  given = '--plan={"host_ratio": 0.8, "weights": "stationary"}'
  done = run("--model=1b", "--micro_batch=2", given, f"--json={path}")
  assert done.returncode == 0, done.stderr
  return done.stdout, json.loads(path.read_text())


def test_the_tables_say_what_was_chosen_and_why(planned):
  text, _ = planned
  assert f"{presets.num_params(presets.gpt('1b')) / 1e9:.2f}e9 param" in text
  for words in ("plan: ", "step: ", "technique", "runner-up", "limit: "):
    assert words in text


def test_the_result_has_the_time_the_memory_and_the_choice(planned):
  text, result = planned
  assert result["fits"] is True
  assert f"step: {result['step_s']:.4f} s" in text
  assert result["limit"] in ("device", "host", "link", "dispatch")
  for name, value in result["choice"].items():
    by_stage = isinstance(value, list)  # written in runs
    assert (f"{name}=(" if by_stage else f"{name}={value}") in text
  assert result["choice"]["host_ratio"] == 0.8
  num_params = presets.num_params(presets.gpt("1b"))
  on_device = result["memory"]["device"]["device_buckets"] / (12 * num_params)
  assert on_device == pytest.approx(0.2, abs=0.05)
  for space, part in result["memory"].items():
    assert 0 < sum(part.values()) <= result["available"][space]


def test_the_largest_model_fits_and_one_block_more_does_not(tmp_path):
  small = machine("gh200").to_json() | {
    "host_bytes": 20 * 10**9,
    "device_bytes": 12 * 10**9,
  }
  profile, result = tmp_path / "small.json", tmp_path / "result.json"
  profile.write_text(json.dumps(small))
  model = ("--model=1b", f"--hardware={profile}", f"--json={result}")
  done = run(*model, "--largest")
  assert done.returncode == 0, done.stderr
  found = json.loads(result.read_text())
  num_layers, width = map(int, found["largest"].split(" x "))
  assert width == 2048 and found["fits"]
  assert found["mode"] in done.stdout
  per_block = 12 * 2048**2 + 13 * 2048
  of_blocks = found["largest_params"] - num_layers * per_block
  longer = dataclasses.replace(presets.gpt("1b"), max_seq_len=2048)
  assert of_blocks == presets.num_params(longer) - 20 * per_block
  # 12 bytes for each parameter, here or there, are the least.
  both = small["host_bytes"] + small["device_bytes"]
  assert 12 * found["largest_params"] < 0.95 * both


def test_the_largest_by_each_way_to_train_is_in_a_table(tmp_path):
  path = tmp_path / "result.json"
  small = machine("gh200").to_json() | {
    "host_bytes": 20 * 10**9,
    "device_bytes": 12 * 10**9,
  }
  profile = tmp_path / "small.json"
  profile.write_text(json.dumps(small))
  done = run(
    "--model=1b", f"--hardware={profile}", "--largest", f"--json={path}"
  )
  assert done.returncode == 0, done.stderr
  result = json.loads(path.read_text())
  frontier = result["frontier"]
  assert {name: result[name] for name in frontier[-1]} == frontier[-1]
  # From what takes most memory to what takes least.
  params = [row["largest_params"] for row in frontier]
  assert params == sorted(params) and params[0] < params[-1]
  ahead, waiting, parked = frontier
  assert ahead["choice"]["speculation"] == "record2"
  assert "max_record_bytes" not in ahead["choice"]
  assert "speculation" not in waiting["choice"]
  assert parked["choice"]["park"] == "device"
  for row in frontier:
    assert f"{row['mode']:<42} {row['largest']:>10}" in done.stdout
    assert f"{row['step_s']:.3f}" in done.stdout
    for space, part in row["memory"].items():
      available = 0.95 * small[f"{space}_bytes"]
      assert sum(part.values()) <= available


def test_a_way_to_train_that_does_not_go_with_what_is_given_is_left_out(
  tmp_path,
):
  path = tmp_path / "result.json"
  small = machine("gh200").to_json() | {
    "host_bytes": 4 * 10**9,
    "device_bytes": 3 * 10**9,
  }
  profile = tmp_path / "small.json"
  profile.write_text(json.dumps(small))
  given = '--plan={"speculation": "wait", "park": "host"}'
  model = "--model=125m", f"--hardware={profile}"
  done = run(*model, given, "--largest", f"--json={path}")
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("not with the switches that are given") == 2
  (row,) = json.loads(path.read_text())["frontier"]
  assert row["mode"] == "waiting"


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--hardware=h900", "there is no machine 'h900'"),
    ("--model=7b", "there is no preset '7b'"),
    ("--plan={", "neither JSON nor a file of it"),
    ("--plan=[1]", "must be a mapping of switches"),
    ('--plan={"speculation": "maybe"}', "speculation='maybe' is not one of"),
    ('--plan={"host_ratio": 1.5}', r"host_ratio=1.5 must lie in [0, 1]"),
    ('--plan={"host_ratio": "most"}', "host_ratio='most' must be a number"),
  ],
)
def test_what_is_unknown_is_refused_with_what_there_is(flag, message):
  done = run(flag)
  assert done.returncode != 0
  assert message in done.stderr
