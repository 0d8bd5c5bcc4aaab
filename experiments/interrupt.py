"""Ctrl-C that waits for the end of a step."""

import os
import signal
from types import FrameType

_STDERR = 2
_NOTICE = b"\nstopping after this step; Ctrl-C again aborts without saving\n"


class Interrupt:
  """Notes the first Ctrl-C while it is open; the second one aborts.

  A step that is cut short leaves nothing worth saving, so the loop asks
  between its steps:

  >>> with Interrupt() as interrupt:
  ...   for step in range(3):
  ...     if interrupt.requested:
  ...       break

  Attributes:
    requested: whether Ctrl-C was pressed.
  """

  def __init__(self):
    self.requested = False
    self._previous = None

  def __enter__(self) -> "Interrupt":
    self._previous = signal.signal(signal.SIGINT, self._note)
    return self

  def __exit__(self, *exc_info: object) -> None:
    signal.signal(signal.SIGINT, self._previous)

  def _note(self, signum: int, frame: FrameType | None) -> None:
    del signum, frame
    self.requested = True
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Past sys.stderr, which may be in the middle of a write when it is pressed.
    os.write(_STDERR, _NOTICE)
