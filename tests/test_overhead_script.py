"""The overhead script: its arithmetic by hand, and a run of a tiny model."""

import itertools
import json

import pytest
from absl.testing import flagsaver

from experiments import overhead
from sojax import models
from sojax.graph.timeline import Span, Timeline


def test_summary_compares_with_the_faster_plain_step_round_by_round():
  measured = {
    "sojax": [3.0, 2.0, 8.0],
    "one_jit": [9.0, 9.0, 9.0],
    "two_jits": [2.0, 4.0, 4.0],
    "gradients": [1.0, 4.0, 2.0],
    "update": [1.0, 1.0, 2.0],
  }
  lanes = {
    "gradients": [2.0, 2.0, 2.0],
    "transfer": [0.5, 0.1, 0.3],
    "update": [0.5, 1.0, 3.0],
  }
  assert overhead.summarise(measured, lanes) == {
    # Ratios 1.5, 0.5, 2.0: not the ratio 3/4 of the medians.
    "ratio_median": 1.5,
    "ratio_quartiles": [1.0, 1.75],
    "faster": "two_jits",
    "step_s": {"sojax": 3.0, "one_jit": 9.0, "two_jits": 4.0},
    "rows": {
      # Ratios 2, 0.5, 1 and 0.5, 1, 1.5.
      "gradients": {"sojax_s": 2.0, "plain_s": 2.0, "ratio_median": 1.0},
      "transfer": {"sojax_s": 0.3},
      "update": {"sojax_s": 1.0, "plain_s": 1.0, "ratio_median": 1.0},
    },
    "rounds": 3,
  }


def test_summary_compares_callbacks_with_dma_round_by_round():
  measured = {
    "sojax": [3.0, 2.0, 8.0],
    "sojax_callback": [6.0, 1.0, 4.0],
    "one_jit": [9.0, 9.0, 9.0],
    "two_jits": [2.0, 4.0, 4.0],
  }
  # Ratios 2, 0.5, 0.5: not the ratio 4/3 of the medians.
  assert overhead.summarise(measured, {})["rows"] == {
    "callback": {"sojax_s": 4.0, "dma_s": 3.0, "ratio_median": 0.5}
  }


def test_lane_seconds_are_those_of_the_newest_step():
  timeline = Timeline(
    [
      Span("forward stage=0", "device", 6, 0.0, 9.0),
      Span("forward stage=0", "device", 7, 10.0, 11.0),
      Span("backward stage=0", "device", 7, 11.0, 13.0),
      Span("validate", "device", 7, 13.0, 13.5),
      Span("grad_out bucket=0", "d2h", 7, 13.0, 13.25),
      Span("host_update bucket=0", "host", 7, 14.0, 15.5),
      Span("weight_in bucket=0", "h2d", 7, 15.5, 16.0),
    ]
  )
  assert overhead.lane_seconds(timeline) == {
    "gradients": 3.0,
    "transfer": 0.75,
    "update": 1.5,
  }


def test_rounds_are_complete_timed_and_in_changing_order(monkeypatch):
  seconds = {"sojax": 1.0, "one_jit": 2.0, "two_jits": 4.0}
  now, calls = [0.0], []
  monkeypatch.setattr("time.perf_counter", lambda: now[0])

  def contender(name):
    def call():
      calls.append(name)
      now[0] += seconds[name]

    return call

  num_timelines = itertools.count(1)

  def timeline():
    start_s = 100.0 * next(num_timelines)
    return Timeline(
      [Span("host_update bucket=0", "host", 1, start_s, 1.5 * start_s)]
    )

  measured, lanes = overhead.measure(
    {name: contender(name) for name in seconds}, 20, timeline
  )
  assert measured == {name: [s] * 20 for name, s in seconds.items()}
  assert lanes["update"] == [50.0 * (i + 1) for i in range(20)]
  assert lanes["gradients"] == lanes["transfer"] == [0.0] * 20
  rounds = [tuple(calls[i : i + 3]) for i in range(0, len(calls), 3)]
  assert all(sorted(order) == sorted(seconds) for order in rounds)
  assert len(rounds) > 20 and len(set(rounds)) > 3


def test_script_writes_a_ratio_and_rows(tmp_path, monkeypatch):
  tiny = models.GPTConfig(
    vocab_size=256, num_layers=1, hidden_dim=32, num_heads=2, max_seq_len=16
  )
  monkeypatch.setattr(models.presets, "gpt", lambda name: tiny)
  path = tmp_path / "new" / "overhead.json"
  flags = ["--rounds=2", "--row_tokens=8", "--tokens=16"]
  with flagsaver.flagsaver():
    overhead.flags.FLAGS(["overhead", f"--json={path}", *flags])
    overhead.main(["overhead"])
  result = json.loads(path.read_text())
  assert set(result) == {"sizes", "config", "commit", "machine"}
  assert [size["tokens"] for size in result["sizes"]] == [16]
  for size in result["sizes"]:
    assert size["rounds"] == 2 and size["ratio_median"] > 0
    assert set(size["rows"]) == {"gradients", "transfer", "update", "callback"}
    assert all(row["sojax_s"] > 0 for row in size["rows"].values())
    assert size["rows"]["update"]["ratio_median"] > 0
    assert size["rows"]["callback"]["ratio_median"] > 0


def test_tokens_that_make_no_rows_are_refused(tmp_path):
  with flagsaver.flagsaver():
    overhead.flags.FLAGS(
      ["overhead", f"--json={tmp_path / 'x'}", "--tokens=20"]
    )
    with pytest.raises(ValueError, match="tokens=20 .* row_tokens=512"):
      overhead.main(["overhead"])
