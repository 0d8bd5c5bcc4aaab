"""The speculation script: its arithmetic by hand, and a run of a tiny model."""

import json

import pytest
from absl.testing import flagsaver

from experiments import speculation
from sojax import models


def test_summary_is_of_ratios_round_by_round():
  measured = {
    "waiting": [2.0, 4.0, 4.0],
    "always": [3.0, 2.0, 8.0],
    "adaptive": [2.0, 4.0, 4.0],
  }
  assert speculation.summarise(measured) == {
    # Ratios 1.5, 0.5, 2: not the ratio 3/4 of the medians.
    "ratios": {"always": 1.5, "adaptive": 1.0},
    "quartiles": {"always": [1.0, 1.5, 1.75], "adaptive": [1.0, 1.0, 1.0]},
    "ratios_of_sums": {"always": 1.3, "adaptive": 1.0},
    "round_s": {"waiting": 4.0, "always": 3.0, "adaptive": 4.0},
    "rounds": 3,
  }


def test_script_compares_all_plans(tmp_path, monkeypatch, capsys):
  tiny = models.GPTConfig(
    vocab_size=256, num_layers=1, hidden_dim=16, num_heads=1, max_seq_len=16
  )
  monkeypatch.setattr(models.presets, "gpt", lambda name: tiny)
  path = tmp_path / "folder" / "result.json"
  flags = ["--num_rounds=3", "--round_steps=2", "--step_tokens=8"]
  with flagsaver.flagsaver():
    speculation.flags.FLAGS(["speculation", f"--json={path}", *flags])
    speculation.main(["speculation"])
  result = json.loads(path.read_text())
  assert set(result["ratios"]) == {"always", "always_record2", "adaptive"}
  assert 0 < result["update_share"] < 1
  assert result["rounds"] == 3
  assert result["steps_ahead"]["waiting"] == 0
  assert 0 <= result["steps_ahead"]["always"] <= 1
  assert {"commit", "machine", "config"} < set(result)
  assert "adaptive: " in capsys.readouterr().out


def test_an_argument_that_is_no_flag_is_refused():
  with pytest.raises(speculation.app.UsageError, match="unexpected argument"):
    speculation.main(["speculation", "now"])
