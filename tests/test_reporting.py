"""Progress and its reports; the oracle is the list of metrics fed in."""

import dataclasses
import struct

import pytest
from tensorboardX.proto import event_pb2

from experiments.reporting import Progress, Reporter


@dataclasses.dataclass
class _Step:
  """Metrics that note when they are waited for."""

  step: int
  waited: list[int]
  grad_norm: float = 2.0
  clipped: bool = False
  skipped: bool = False
  clip_scale: float = 1.0
  speculated: int = 0
  committed: int = 0
  redone: int = 0
  undone: int = 0
  record_bytes: int = 0
  escapes: int = 0
  exposed_host_s: float = 0.25

  @property
  def loss(self) -> float:
    if self.step not in self.waited:
      self.waited.append(self.step)
    return 10.0 - self.step


def _reporter(tmp_path, progress, num_steps=5):
  return Reporter(
    progress, num_steps=num_steps, tokens_per_step=64, log_dir=tmp_path
  )


def _events(log_dir):
  """Reads a TensorBoard log: records of length, CRC, event and CRC."""
  for path in sorted(log_dir.glob("events.*")):
    content, start = path.read_bytes(), 0
    while start < len(content):
      (length,) = struct.unpack_from("<Q", content, start)
      event = event_pb2.Event()
      event.ParseFromString(content[start + 12 : start + 12 + length])
      yield event
      start += length + 16


def _scalars(log_dir):
  return {
    (value.tag, event.step): value.simple_value
    for event in _events(log_dir)
    for value in event.summary.value
  }


def test_a_step_is_waited_for_when_the_next_one_has_started(tmp_path):
  waited = []
  with _reporter(tmp_path, Progress()) as reporter:
    reporter.add(_Step(0, waited))
    assert waited == []
    reporter.add(_Step(1, waited))
    assert waited == [0]
    reporter.flush()
    assert waited == [0, 1]
    reporter.flush()
    reporter.add(_Step(2, waited))
  assert waited == [0, 1, 2]
  assert reporter.progress.steps == 3


def test_progress_goes_on_from_what_it_was(tmp_path):
  progress = Progress(
    steps=2, initial_loss=12.5, final_loss=9.0, clipped=1, exposed_host_s=1.0
  )
  with _reporter(tmp_path, progress) as reporter:
    reporter.add(_Step(2, [], clipped=True, speculated=7, redone=7))
    reporter.add(_Step(3, [], skipped=True, speculated=7, undone=1))
    reporter.add(_Step(4, [], speculated=7, committed=7))
  assert progress == Progress(
    steps=5,
    initial_loss=12.5,
    final_loss=6.0,
    clipped=2,
    skipped=1,
    speculated=3,
    taken_back=2,
    exposed_host_s=1.75,
  )


def test_speed_leaves_the_first_step_out(tmp_path, monkeypatch):
  times = iter([100.0, 102.0, 103.0])
  monkeypatch.setattr("time.perf_counter", lambda: next(times))
  with _reporter(tmp_path, Progress()) as reporter:
    for step in range(3):
      reporter.add(_Step(step, []))
      reporter.flush()
      # NaN differs from itself.
      assert (reporter.tokens_per_s != reporter.tokens_per_s) == (step == 0)
    assert reporter.tokens_per_s == 2 * 64 / 3.0


def test_log_holds_every_scalar_of_every_step(tmp_path):
  with _reporter(tmp_path, Progress()) as reporter:
    for step in range(3):
      figures = {"speculated": 9, "committed": 4, "redone": 3, "undone": 2}
      figures |= {"record_bytes": 900, "escapes": step, "clip_scale": 0.5}
      reporter.add(_Step(step, [], clipped=step == 1, **figures))
  expected = {}
  for step in range(3):
    expected["loss", step] = 10.0 - step
    expected["grad_norm", step] = 2.0
    expected["clipped", step] = float(step == 1)
    expected["skipped", step] = 0.0
    expected["clip_scale", step] = 0.5
    expected["speculated", step] = 9.0
    expected["committed", step] = 4.0
    expected["redone", step] = 3.0
    expected["undone", step] = 2.0
    expected["record_bytes", step] = 900.0
    expected["escapes", step] = float(step)
    expected["exposed_host_s", step] = 0.25
  assert _scalars(tmp_path) == expected


def test_bar_shows_loss_speed_and_exposed_time(tmp_path, capsys):
  with _reporter(tmp_path, Progress()) as reporter:
    for step in range(5):
      reporter.add(_Step(step, []))
  captured = capsys.readouterr()
  assert captured.out == ""
  last = captured.err.split("\r")[-1]
  assert "5/5" in last and "loss=6.000" in last
  assert "exposed host ms=250.0" in last and "tokens/s=" in last


def test_bar_of_a_resumed_run_starts_where_it_stopped(tmp_path, capsys):
  with _reporter(tmp_path, Progress(steps=3)) as reporter:
    reporter.add(_Step(3, []))
  assert "4/5" in capsys.readouterr().err.split("\r")[-1]


def test_failed_run_closes_without_waiting_for_the_failed_step(tmp_path):
  waited = []
  with pytest.raises(RuntimeError, match="broken"):
    with _reporter(tmp_path, Progress()) as reporter:
      reporter.add(_Step(0, waited))
      raise RuntimeError("broken")
  assert waited == []
