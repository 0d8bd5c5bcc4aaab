"""Calibration, at tiny sizes: sane figures, and inputs like the runtime's.

No figure has an oracle here. That programs are timed on arguments like those of
a training run has one: nothing is compiled again.
"""

import dataclasses
import itertools
import json
import math
import weakref

import jax
import matplotlib.image
import pytest
from absl.testing import flagsaver

from experiments import calibrate as script
from sojax import models
from sojax.calibrate import (
  Effort,
  measure_profile,
  measure_stages,
  this_machine,
  timing,
)
from sojax.calibrate import device as device_figures
from sojax.calibrate import host as host_figures
from sojax.calibrate import stages as stage_figures
from sojax.host.kernels import Pool, cpu_info
from sojax.plan.hardware import HOST_OPERATIONS, HardwareProfile
from tests import training

_TINY = Effort(
  seconds=0.05,
  matrix_dims=(4, 8),
  transfer_bytes=(64, 256),
  device_bytes=1 << 12,
  host_elems=1000,
  host_rounds=1,
)


def test_a_profile_is_measured_and_survives_a_file(tmp_path):
  profile = measure_profile(name="here", effort=_TINY)
  assert profile.name == "here"
  assert profile.device_is_host
  assert profile.measured_on == this_machine()
  profile.check_measured_on(this_machine())
  assert set(profile.device_flops) == {"float32", "bfloat16", "float16"}
  assert [flops for flops, _ in profile.efficiency.points] == [128, 1024]
  assert max(share for _, share in profile.efficiency.points) == 1
  for name in ("d2h", "h2d", "d2h_pageable", "h2d_pageable"):
    assert [x for x, _ in getattr(profile, name).points] == [64, 256]
  cores = cpu_info().cores
  for rates in profile.host_rates.values():
    assert rates.points[0][0] == 1
    assert rates.points[-1][0] == cores == profile.host_cores
  best = max(r for c in profile.host_rates.values() for _, r in c.points)
  assert profile.host_bandwidth == best
  assert 0 < profile.dispatch_s < 1
  assert 0 < profile.host_task_s <= profile.host_cores * profile.dispatch_s
  measured = {x.name for x in dataclasses.fields(profile)} - {
    "name",
    "device_is_host",
    "sources",
    "measured_on",
  }
  assert set(profile.sources) == measured
  profile.save(tmp_path / "here.json")
  assert HardwareProfile.load(tmp_path / "here.json") == profile


def test_larger_products_are_left_out_once_one_takes_too_long():
  profile = measure_profile(effort=dataclasses.replace(_TINY, seconds=-1.0))
  assert [flops for flops, _ in profile.efficiency.points] == [128]


class _Received:
  """Has an identity."""


def test_a_transfer_sends_what_was_not_sent_for_longest_and_keeps_as_many():
  sources, sent, alive = itertools.count(), [], weakref.WeakSet()
  most_alive = []

  def send(source):
    sent.append(source)
    received = _Received()
    alive.add(received)
    most_alive.append(len(alive))
    return received

  effort = dataclasses.replace(_TINY, seconds=0.0, transfer_bytes=(1 << 26,))
  device_figures._bandwidth(effort, lambda size: next(sources), send)
  number = timing.cold_copies(1 << 26)
  assert number == 5
  assert len(sent) > number
  assert sent == [x % number for x in range(len(sent))]
  assert most_alive[number:] == [number + 1] * (len(sent) - number)


def test_a_machine_is_known_by_its_cpu_cores_device_and_jax():
  machine = this_machine()
  assert set(machine) == {"cpu", "cores", "device", "jax"}
  assert machine["jax"] == jax.__version__
  assert all(isinstance(x, str) and x for x in machine.values())


def test_the_median_is_of_runs_after_the_first_and_without_preparation(
  monkeypatch,
):
  # The clock runs 9 s in the first run, then 1, 8 and 3 s; 100 s in between.
  now, durations, log = [0.0], [9.0, 1.0, 8.0, 3.0], []
  monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

  def prepare():
    now[0] += 100.0
    return len(log)

  def run(prepared):
    log.append(prepared)
    now[0] += durations[prepared]

  assert timing.median_s(run, 0.0, prepare) == 3.0
  assert log == [0, 1, 2, 3]


def test_runs_end_with_the_budget(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
  log = []

  def run(_):
    log.append(0)
    now[0] += 1.0

  timing.median_s(run, 6.5)
  assert len(log) == 1 + 7
  log.clear()
  timing.median_s(run, math.inf)
  assert len(log) == 1 + 100


def _arrays(operation):
  """The segments' arrays, and a record's codes."""
  found = [
    array
    for segment in operation.segments
    for array in segment.fields()
    if array is not None
  ]
  if hasattr(operation, "record"):
    found.append(operation.record.codes)
  return found


# Arrays that an operation reads and writes; the others it does one of the two.
_INOUT = {
  "step": 3,
  "record2": 3,
  "record3": 3,
  "copy": 0,
  "undo": 3,
  "redo": 3,
  "accumulate": 1,
  "widen": 0,
  "narrow": 0,
}


def test_bytes_are_those_of_the_arrays_read_and_written():
  num_elems = 1 << 12
  with Pool(1) as pool:
    measured = host_figures._operations(num_elems, pool)
    assert set(measured) == set(HOST_OPERATIONS) == set(_INOUT)
    for name, one in measured.items():
      num_bytes = sum(array.nbytes for array in _arrays(one.operation))
      num_bytes += 4 * num_elems * _INOUT[name]
      assert one.num_bytes == num_bytes, name


def test_every_operation_can_be_run_again_and_again():
  with Pool(2) as pool:
    measured = host_figures._operations(3000, pool)
    seconds = host_figures._time(measured, pool, 3)
  assert set(seconds) == set(HOST_OPERATIONS)
  assert min(seconds.values()) > 0


def _compiled(trainer) -> list[int]:
  """How often each program of a trainer was compiled."""
  setup = trainer._setup
  keep = setup.keep_programs
  programs = [keep.get(i, x) for i, x in enumerate(setup.programs)]
  return [
    program._jitted._cache_size()
    for of_stage in programs
    for program in (of_stage.forward, of_stage.finish)
  ]


@pytest.mark.parametrize(
  ("num_devices", "plan"),
  [
    (1, {}),
    pytest.param(
      1, {"activations": "keep", "weights": "flow"}, marks=pytest.mark.slow
    ),
    pytest.param(2, {}, marks=pytest.mark.slow),
  ],
)
def test_stages_are_measured_on_what_training_runs_them_on(num_devices, plan):
  # A width of its own for each case, or programs of another test would count.
  hidden_dim = 16 * (3 + len(plan) + num_devices)
  model = training.small_gpt(num_layers=1, hidden_dim=hidden_dim)
  with training.trainer(
    plan, model=model, mesh=training.mesh_of(num_devices), precision="bf16"
  ) as trainer:
    (batch,) = training.batches(1, rows=4 * num_devices)
    trainer.step(batch)
    trainer.drain()
    before = _compiled(trainer)
    seconds = measure_stages(
      trainer._setup, effort=_TINY, vocab_size=training.VOCAB_SIZE
    )
    assert _compiled(trainer) == before
  assert all(count <= 1 for count in before)
  num_stages = trainer.layout.model.num_stages
  assert len(seconds.forward) == len(seconds.backward) == num_stages
  assert seconds.forward[-1] == 0
  assert min(*seconds.forward[:-1], *seconds.backward) > 0


def test_equal_stages_are_measured_once(monkeypatch):
  model = training.small_gpt(num_layers=3, hidden_dim=32)
  with training.trainer(model=model) as trainer:
    measured = []

    def fake(programs, inputs, budget_s):
      measured.append(programs.spec.position)
      return float(len(measured)), 0.5

    monkeypatch.setattr(stage_figures, "_measure", fake)
    seconds = measure_stages(trainer._setup)
  # The embedding, one block for all, the head.
  assert len(measured) == 3
  assert seconds.forward == (1.0, 2.0, 2.0, 2.0, 3.0)
  assert seconds.backward == (0.5,) * 5


@pytest.mark.slow
def test_a_model_that_delivers_its_gradients_is_measured():
  with training.trainer({"gradients_out": "callback"}) as trainer:
    seconds = measure_stages(trainer._setup, effort=_TINY)
  assert min(seconds.backward) > 0


def test_the_script_writes_a_profile_and_a_picture(
  tmp_path, monkeypatch, capsys
):
  tiny = models.GPTConfig(
    vocab_size=256, num_layers=1, hidden_dim=16, num_heads=1, max_seq_len=16
  )
  monkeypatch.setattr(models.presets, "gpt", lambda name: tiny)
  monkeypatch.setattr(script, "Effort", lambda: _TINY)
  path, picture = tmp_path / "a" / "here.json", tmp_path / "b" / "here.png"
  with flagsaver.flagsaver():
    script.flags.FLAGS(
      [
        "calibrate",
        f"--json={path}",
        f"--picture={picture}",
        "--machine=bench",
        "--stages_of=tiny",
        "--stage_tokens=8",
      ]
    )
    script.main(["calibrate"])
  profile = HardwareProfile.load(path)
  assert profile.name == "bench"
  assert json.loads(path.read_text()) == profile.to_json()
  assert matplotlib.image.imread(picture).shape == (750, 1200, 4)
  out = capsys.readouterr().out
  for text in ("| knee |", "| record3 |", "| float32 |", "| stage |", "| 2 |"):
    assert text in out


def test_the_table_shows_the_knee(monkeypatch):
  profile = measure_profile(effort=_TINY)
  curve = profile.d2h
  rising = dataclasses.replace(
    profile,
    d2h=type(curve)(((2.0**20, 5e9), (2.0**21, 9e9), (2.0**22, 1e10))),
    h2d=type(curve).flat(2e9),
  )
  lines = script.table(rising)
  (knee,) = [line for line in lines if line.startswith("| knee")]
  assert knee.split(" | ")[1] == "2 MiB"
  (first,) = [line for line in lines if line.startswith("| 1 | 5 | 2 |")]
  assert first.endswith("|")


def test_an_argument_that_is_no_flag_is_refused():
  with pytest.raises(script.app.UsageError, match="unexpected argument"):
    script.main(["calibrate", "now"])
