"""The README's example, run as it stands."""

import re
from pathlib import Path

import sojax

_README = Path(__file__).parents[1] / "README.md"


def test_example_trains_saves_and_draws(tmp_path, monkeypatch, capsys):
  (example,) = re.findall(r"```python\n(.*?)```", _README.read_text(), re.S)
  monkeypatch.chdir(tmp_path)
  exec(compile(example, str(_README), "exec"), {})
  loss = float(capsys.readouterr().out)
  # Uniform bytes cost log(256) = 5.5 nats; a model that learns is well below.
  assert loss < 4.5
  assert (tmp_path / "runs/mine").is_dir()
  assert (tmp_path / "runs/mine.perfetto.json").is_file()


def test_names_and_plan_of_the_text_exist():
  plan = {"weights": "flow", "bucket_bytes": 1 << 24}
  assert sojax.Plan.of(plan).weights == "flow"
  named = set(re.findall(r"sojax\.([A-Za-z]+)", _README.read_text()))
  assert named <= set(dir(sojax)), named
