"""The README's examples, run as they stand."""

import re
from pathlib import Path

import pytest

import sojax

_README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def run_example(tmp_path, monkeypatch, capsys):
  """Runs the first example of a section; returns the loss that it prints."""
  monkeypatch.chdir(tmp_path)

  def run(section):
    text = _README.read_text().split(f"\n## {section}\n")[1]
    example = re.findall(r"```python\n(.*?)```", text, re.S)[0]
    exec(compile(example, str(_README), "exec"), {})
    return float(capsys.readouterr().out)

  return run


def test_example_trains_saves_and_draws(run_example, tmp_path):
  loss = run_example("In your own script")
  # Uniform bytes cost log(256) = 5.5 nats; a model that learns is well below.
  assert loss < 4.5
  assert (tmp_path / "runs/mine").is_dir()
  assert (tmp_path / "runs/mine.perfetto.json").is_file()


@pytest.mark.parametrize(
  "section", ["A model of your own", "A model in stages"]
)
def test_model_of_ones_own_trains(run_example, section):
  # Bytes cost 3.3 nats by their own frequencies, 2.4 by those after the byte
  # before: the figures of experiments.bigram for this text.
  assert 2.0 < run_example(section) < 3.0


def test_names_and_plan_of_the_text_exist():
  plan = {"weights": "flow", "bucket_bytes": 1 << 24}
  assert sojax.Plan.of(plan).weights == "flow"
  named = set(re.findall(r"sojax\.([A-Za-z]+)", _README.read_text()))
  assert named <= set(dir(sojax)), named
