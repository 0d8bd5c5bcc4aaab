"""Ctrl-C; the oracle is a signal that this process sends to itself."""

import io
import os
import signal
import sys

import pytest

from experiments.interrupt import Interrupt


def _press_ctrl_c():
  os.kill(os.getpid(), signal.SIGINT)


def test_first_ctrl_c_is_noted_and_nothing_else(capfd):
  with Interrupt() as interrupt:
    assert not interrupt.requested
    _press_ctrl_c()
    assert interrupt.requested
  captured = capfd.readouterr()
  assert "stopping after this step" in captured.err
  assert captured.out == ""


class _PressedWhileWriting(io.RawIOBase):
  """A terminal at which Ctrl-C is pressed in the middle of a write."""

  def writable(self):
    return True

  def write(self, data):
    _press_ctrl_c()
    return len(data)


def test_ctrl_c_while_stderr_is_written_is_noted(monkeypatch):
  terminal = io.BufferedWriter(_PressedWhileWriting())
  stderr = io.TextIOWrapper(terminal, write_through=True)
  monkeypatch.setattr(sys, "stderr", stderr)
  with Interrupt() as interrupt:
    print("progress", file=sys.stderr, flush=True)
    assert interrupt.requested
  monkeypatch.undo()
  stderr.detach()
  monkeypatch.setattr(_PressedWhileWriting, "write", lambda _, data: len(data))


def test_second_ctrl_c_aborts():
  with Interrupt():
    _press_ctrl_c()
    with pytest.raises(KeyboardInterrupt):
      _press_ctrl_c()


@pytest.mark.parametrize("num_pressed", [0, 1])
def test_ctrl_c_means_what_it_did_before_once_closed(num_pressed):
  pressed = []
  previous = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
  try:
    with Interrupt():
      for _ in range(num_pressed):
        _press_ctrl_c()
    assert pressed == []
    _press_ctrl_c()
    assert pressed == [1]
  finally:
    signal.signal(signal.SIGINT, previous)
