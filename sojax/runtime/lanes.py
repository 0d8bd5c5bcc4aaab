"""Waiter threads: one per lane, each waiting for work in the order of issue."""

import queue
import threading
from collections.abc import Callable


class Waiter:
  """A thread that runs waits one after another.

  The waits block until something that was issued elsewhere is complete. They
  handle their own exceptions.
  """

  def __init__(self, name: str):
    self._waits: queue.SimpleQueue[Callable[[], None] | None] = (
      queue.SimpleQueue()
    )
    self._thread = threading.Thread(
      target=self._run, name=f"sojax-{name}", daemon=True
    )
    self._thread.start()

  def submit(self, wait: Callable[[], None]) -> None:
    """Appends a wait to the lane; does not block."""
    self._waits.put(wait)

  def close(self) -> None:
    """Runs what was submitted, then ends the thread; may be called again."""
    if self._thread.is_alive():
      self._waits.put(None)
      self._thread.join()

  def _run(self) -> None:
    while (wait := self._waits.get()) is not None:
      wait()
      del wait  # or it would keep its arrays until the next one comes
