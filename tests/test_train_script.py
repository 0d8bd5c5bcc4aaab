"""The training script, end to end on a tiny model.

Oracles: the uninterrupted run for resuming, and the model's plain logits for
what the script says of it.
"""

import dataclasses
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from absl import app
from absl.testing import flagsaver

import sojax
from experiments import bigram, encodings, train
from sojax import data, models
from tests.tokenizing import byte_pair_tokenizer

_ROOT = Path(__file__).parents[1]
_ISSUE_KEYS = {
  "steps",
  "initial_loss",
  "final_loss",
  "validation_loss",
  "bigram_loss",
  "tokens_per_s",
  "tflops",
  "clipped",
  "skipped",
  "exposed_host_s",
  "checkpoint",
  "timeline",
}
_TEXT = "the quick brown fox jumps over the lazy dog, and so on.\n" * 40


@pytest.fixture
def text_path(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text(_TEXT)
  return path


@pytest.fixture
def tokenizer_path(tmp_path):
  path = tmp_path / "tokenizer.json"
  byte_pair_tokenizer([_TEXT], 280).save(str(path))
  return path


@pytest.fixture
def run_script(tmp_path, text_path, monkeypatch, capsys):
  """Runs the script's main in this process; returns its JSON."""
  tiny = models.GPTConfig(
    vocab_size=256, num_layers=2, hidden_dim=32, num_heads=2, max_seq_len=64
  )
  monkeypatch.setattr(models.presets, "gpt", lambda name: tiny)
  fixed = [f"--data={text_path}", "--micro_batch=2", "--seq_len=16"]

  def run(*flags, out=tmp_path / "runs", steps=6):
    saved = flagsaver.flagsaver()
    with saved:
      train.FLAGS(["train", *fixed, f"--out={out}", f"--steps={steps}", *flags])
      capsys.readouterr()
      train.main(["train"])
    return json.loads(capsys.readouterr().out)

  return run


@pytest.fixture
def press_ctrl_c(monkeypatch):
  """Makes the batch of a given step arrive together with a real Ctrl-C."""
  original = data.BatchSampler.batch

  def at_step(number):
    def batch(sampler, step):
      if step == number:
        os.kill(os.getpid(), signal.SIGINT)
      return original(sampler, step)

    monkeypatch.setattr(data.BatchSampler, "batch", batch)

  return at_step


def _trained(result) -> sojax.Trainer:
  """A trainer in the state of a run's last checkpoint."""
  config = dict(result["config"])
  plan = config.pop("plan")
  trainer = train.make_trainer(train.Settings(**config), plan)
  trainer.restore(result["checkpoint"])
  return trainer


def _token_losses(result, tokens) -> list[float]:
  """The loss of each token but the first, from the model's plain logits."""
  with _trained(result) as trainer:
    model = trainer.sync_model()
  losses = []
  for start in range(0, len(tokens) - 1, 16):
    row = tokens[start : start + 17]
    logits = np.asarray(model(row[None, :-1]), np.float64)[0]
    log_sum = np.log(np.exp(logits).sum(1))
    losses += (log_sum - logits[np.arange(len(row) - 1), row[1:]]).tolist()
  return losses


def _assert_same_state(one, other) -> None:
  """Compares every element of two runs' masters and moments, and counts."""
  with _trained(one) as one, _trained(other) as other:
    assert one.count == other.count and one.num_steps == other.num_steps
    for index, leaf in enumerate(one._state.leaves):
      for kind in ("master", "mu", "nu"):
        span = (index, kind, 0, leaf.size)
        np.testing.assert_array_equal(
          one._state.read(*span), other._state.read(*span), leaf.name
        )


def test_run_reports_and_writes_everything(run_script, tmp_path):
  result = run_script(steps=30)
  assert set(result) >= _ISSUE_KEYS | {"commit", "machine", "config"}
  assert result["steps"] == 30
  assert abs(result["initial_loss"] - math.log(256)) < 0.2
  assert result["final_loss"] < result["initial_loss"]
  assert result["skipped"] == 0 and 0 <= result["clipped"] <= 30
  assert result["exposed_host_s"] >= 0.0
  flops_per_token = 6 * (2 * 12 * 32**2 + 256 * 32) + 12 * 2 * 16 * 32
  tflops = 1e-12 * result["tokens_per_s"] * flops_per_token
  assert result["tflops"] == pytest.approx(tflops) and tflops > 0
  assert result["interrupted"] is False

  folder = tmp_path / "runs" / "0001"
  assert Path(result["checkpoint"]) == folder / "checkpoints/step_00000030"
  events = json.loads(Path(result["timeline"]).read_text())["traceEvents"]
  lanes = {event["cat"] for event in events if event["ph"] == "X"}
  assert lanes == {"device", "d2h", "h2d", "host"}
  assert (folder / "timeline.png").stat().st_size > 1000
  assert list((folder / "tensorboard").glob("events.*"))


def test_losses_are_those_of_the_model_and_of_bigrams_on_the_same_bytes(
  run_script,
):
  result = run_script()
  corpus = data.split_documents([_TEXT.encode()])
  text = np.frombuffer(corpus.validation, np.uint8).astype(np.int32)
  losses = _token_losses(result, text)
  # Float32 sums of a few dozen terms per loss, here and there.
  assert result["validation_loss"] == pytest.approx(np.mean(losses), rel=1e-5)

  model = bigram.fit(data.encode(corpus.train))
  expected = -np.mean(model.log_probs[text[:-1], text[1:]])
  assert result["bigram_loss"] == pytest.approx(expected, rel=1e-12)


def test_losses_of_a_tokenizer_are_those_of_the_bytes_that_it_predicts(
  run_script, tokenizer_path, monkeypatch
):
  monkeypatch.setattr(train, "_VALIDATION_TOKENS", 40)  # 2 batches of 2 rows
  result = run_script(f"--tokenizer={tokenizer_path}")
  assert result["config"]["vocab_size"] == 281  # and the separator
  # Tokens are drawn with equal probability in the beginning.
  assert abs(result["initial_loss"] - math.log(281)) < 0.2

  encoding = encodings.load(str(tokenizer_path))
  corpus = data.split_documents([_TEXT.encode()])
  tokens = encoding.encode(corpus.validation)[: 2 * 2 * 16 + 1]
  first = encoding.decode(tokens[:1])
  text = np.frombuffer(encoding.decode(tokens), np.uint8)
  num_bytes = len(text) - len(first)
  assert num_bytes > tokens.size  # so that tokens and bytes differ
  losses = _token_losses(result, tokens)
  assert result["validation_loss"] == pytest.approx(
    np.sum(losses) / num_bytes, rel=1e-5
  )
  model = bigram.fit(data.encode(corpus.train))
  log_probs = model.log_probs[text[:-1], text[1:]][-num_bytes:]
  assert result["bigram_loss"] == pytest.approx(-np.mean(log_probs), rel=1e-12)


def test_sample_is_decoded_with_the_tokenizer(
  run_script, tokenizer_path, monkeypatch
):
  encoding = encodings.load(str(tokenizer_path))
  drawn = encoding.encode(b"the lazy brown fox\n")

  def sample(model, prompt, **options):
    assert encoding.decode(prompt) == data.SEPARATOR
    return drawn

  shown = io.StringIO()
  monkeypatch.setattr(train.sampling, "sample", sample)
  monkeypatch.setattr(train.sys, "stderr", shown)
  run_script(f"--tokenizer={tokenizer_path}", steps=1)
  assert "\nthe lazy brown fox\n" in shown.getvalue()


@pytest.mark.parametrize("tokens", ["bytes", "tokenizer"])
def test_ctrl_c_saves_and_resume_ends_in_the_same_bits(
  run_script, press_ctrl_c, tmp_path, tokenizer_path, tokens
):
  flags = [] if tokens == "bytes" else [f"--tokenizer={tokenizer_path}"]
  straight = run_script(*flags, out=tmp_path / "straight")
  press_ctrl_c(2)
  stopped = run_script(*flags, out=tmp_path / "resumed")
  assert stopped["steps"] == 3 and stopped["interrupted"] is True
  assert stopped["validation_loss"] is None
  assert stopped["checkpoint"].endswith("step_00000003")
  press_ctrl_c(None)
  resumed = run_script("--resume", *flags, out=tmp_path / "resumed")

  names = ["steps", "initial_loss", "final_loss", "validation_loss"]
  names += ["bigram_loss", "clipped", "skipped", "interrupted"]
  assert {n: resumed[n] for n in names} == {n: straight[n] for n in names}
  _assert_same_state(resumed, straight)


def test_run_that_has_ended_can_be_resumed(run_script):
  ended = run_script()
  again = run_script("--resume")
  assert again["checkpoint"] == ended["checkpoint"]
  assert again["validation_loss"] == ended["validation_loss"]
  assert again["tokens_per_s"] is None
  _assert_same_state(again, ended)


def test_resume_takes_the_newest_run_with_a_checkpoint(run_script, tmp_path):
  first = run_script("--seed=1", steps=2)
  second = run_script("--seed=2", steps=2)
  assert "/0001/" in first["checkpoint"] and "/0002/" in second["checkpoint"]
  (tmp_path / "runs" / "0003").mkdir()
  resumed = run_script("--resume", "--seed=2", steps=2)
  assert resumed["checkpoint"] == second["checkpoint"]


def test_failed_run_resumes_from_the_last_save_on_the_way(
  run_script, monkeypatch, tmp_path
):
  original, seeds = data.BatchSampler.batch, set()

  def batch(sampler, step):
    seeds.add(sampler.seed)
    if step == 7:
      raise RuntimeError("out of paper")
    return original(sampler, step)

  # A clock that is read once per step, and saves that are due at every second.
  clock = types.SimpleNamespace(monotonic=itertools.count().__next__)
  with monkeypatch.context() as patch:
    patch.setattr(data.BatchSampler, "batch", batch)
    patch.setattr(train, "time", clock)
    patch.setattr(train, "_SAVE_EVERY_S", 2)
    with pytest.raises(RuntimeError, match="out of paper"):
      run_script("--seed=3", out=tmp_path / "failed", steps=8)
  assert seeds == {3}
  saved = (tmp_path / "failed/0001/checkpoints").glob("step_*")
  assert sorted(path.name[-1] for path in saved) == ["4", "6"]  # of 2, 4, 6

  flags = ["--seed=3"]
  resumed = run_script("--resume", *flags, out=tmp_path / "failed", steps=8)
  straight = run_script(*flags, out=tmp_path / "straight", steps=8)
  for name in ("steps", "initial_loss", "final_loss", "clipped"):
    assert resumed[name] == straight[name]
  _assert_same_state(resumed, straight)


def test_plan_is_free_when_a_run_is_resumed(run_script, press_ctrl_c, tmp_path):
  press_ctrl_c(2)
  plan = '--plan={"bucket_bytes": 65536, "pool_threads": 1}'
  run_script(plan, out=tmp_path / "resumed")
  press_ctrl_c(None)
  resumed = run_script("--resume", out=tmp_path / "resumed")
  straight = run_script(out=tmp_path / "straight")
  _assert_same_state(resumed, straight)


def test_resume_with_other_settings_is_refused(run_script, tmp_path):
  run_script(steps=2)
  other = tmp_path / "other.txt"
  other.write_text(_TEXT.upper())
  for flag, message in [
    ("--seed=1", "seed=0, not 1"),
    ("--learning_rate=0.5", r"learning_rate=0\.\d+, not 0\.5"),
    ("--steps=7", "steps=2, not 7"),
    (f"--data={other}", "text_sha256="),
  ]:
    with pytest.raises(ValueError, match=message):
      run_script("--resume", flag, steps=2)


def test_resume_with_another_tokenizer_is_refused(
  run_script, tokenizer_path, tmp_path
):
  def refuses(message, *flags):
    with pytest.raises(ValueError, match=message):
      run_script("--resume", *flags, steps=2)

  other = tmp_path / "other.json"
  # As many tokens, so that the model fits.
  byte_pair_tokenizer([_TEXT.upper()], 280).save(str(other))
  run_script(f"--tokenizer={tokenizer_path}", steps=2)
  refuses(
    "tokenizer_sha256=[0-9a-f]{64}, not [0-9a-f]{64}", f"--tokenizer={other}"
  )
  refuses("vocab|shape")


def test_resume_without_a_run_is_refused(run_script, tmp_path):
  with pytest.raises(ValueError, match="holds no run with a checkpoint"):
    run_script("--resume")


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--data=/nowhere", "/nowhere does not exist"),
    ("--tokenizer=/nowhere", "--tokenizer=/nowhere is no file"),
    (f"--tokenizer={__file__}", "no tokenizer of use here: "),
    ("--precision=fp8", "precision='fp8'"),
    ('--plan={"wieghts": "flow"}', "wieghts"),
  ],
)
def test_bad_flags_leave_no_run_behind(run_script, tmp_path, flag, message):
  with pytest.raises(ValueError, match=message):
    run_script(flag)
  assert not (tmp_path / "runs").exists()


def test_stray_argument_is_refused():
  with pytest.raises(app.UsageError, match="unexpected argument x"):
    train.main(["train", "x"])


def test_every_setting_has_a_flag_and_flags_are_a_dozen():
  own = train.FLAGS.flags_by_module_dict()["experiments.train"]
  names = {flag.name for flag in own}
  assert len(names) <= 12
  settings = {field.name for field in dataclasses.fields(train.Settings)}
  read = {"text_sha256", "tokenizer_sha256", "vocab_size"}
  assert settings - read <= names


def _start_script(*flags, **popen) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, "-m", "experiments.train", *flags],
    cwd=_ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    **popen,
  )


def test_ctrl_c_in_a_terminal_saves_and_exits_cleanly(tmp_path, text_path):
  process = _start_script(
    f"--data={text_path}",
    f"--out={tmp_path / 'runs'}",
    "--steps=1000000",
    "--micro_batch=1",
    "--seq_len=16",
  )
  seen = b""
  while b"loss=" not in seen:
    chunk = process.stderr.read1()
    assert chunk, seen.decode()
    seen += chunk
  process.send_signal(signal.SIGINT)
  out, err = process.communicate()
  assert process.returncode == 0, err.decode()
  result = json.loads(out)
  assert result["interrupted"] is True and result["steps"] >= 1
  with _trained(result) as trainer:
    assert trainer.num_steps == result["steps"]


@pytest.mark.slow
def test_default_run_knows_more_than_bigrams(tmp_path):
  process = _start_script(f"--out={tmp_path}")
  out, err = process.communicate()
  assert process.returncode == 0, err.decode()
  assert out.count(b"\n") == 1
  result = json.loads(out)
  assert result["validation_loss"] < result["bigram_loss"]
  assert result["skipped"] == 0
  sample = err.decode().split("-" * 80)[1]
  assert len(sample.encode()) > 150
