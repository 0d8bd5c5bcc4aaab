"""Threads that run what they are given, one after another."""

import queue
import threading
from collections.abc import Callable


class Worker:
  """A thread with a queue of jobs, which handle their own exceptions."""

  def __init__(self, name: str):
    self._jobs: queue.SimpleQueue[Callable[[], None] | None] = (
      queue.SimpleQueue()
    )
    self._thread = threading.Thread(
      target=self._run, name=f"sojax-{name}", daemon=True
    )
    self._thread.start()

  def submit(self, job: Callable[[], None]) -> None:
    """Appends a job; does not wait for it."""
    self._jobs.put(job)

  def stop(self) -> None:
    """Lets the thread end after the jobs that were submitted."""
    self._jobs.put(None)

  def join(self) -> None:
    """Waits for the thread's end."""
    self._thread.join()

  @property
  def is_current(self) -> bool:
    """Whether the caller runs on this thread."""
    return self._thread is threading.current_thread()

  def _run(self) -> None:
    while (job := self._jobs.get()) is not None:
      job()
      del job  # or it would keep its arrays until the next one comes
