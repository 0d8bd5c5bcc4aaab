"""Executes step graphs: issues tasks in schedule order, stamps their ends.

Two threads issue work. The caller's thread issues all device programs, and
transfers that do not come from a host update; it is the only one that
dispatches programs, in schedule order. The host thread adds up gradients, runs
host updates and sends their results. One thread per asynchronous lane waits for
completion. Nobody polls: every wait is on a condition that each completion and
each failure notifies.

Nor can the threads wait for each other for ever: each issues its tasks in
schedule order, step after step, and every task waits for earlier ones only. So
the earliest task that has not ended is always one that can be issued, or has
been and will end.
"""

import collections
import threading
import time
from collections.abc import Callable, Mapping

from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.graph.timeline import Timeline
from sojax.runtime.lanes import Worker
from sojax.runtime.run import StepError, StepRun, StepTimes
from sojax.runtime.step import Step

Wait = Callable[[], None]
Action = Callable[[Task, Step], Wait | None]
"""Issues a task. What it returns blocks until the task is complete; None if it
is complete already."""

TIMELINE_STEPS = 64
"""Steps whose spans are kept."""


class Executor:
  """Runs steps of one graph, several in flight."""

  def __init__(
    self,
    graph: StepGraph,
    actions: Mapping[TaskKind, Action],
    *,
    interrupt: Callable[[int], None] = lambda first_step: None,
    reset: Callable[[], None] = lambda: None,
  ):
    """Starts the threads.

    Args:
      graph: the step graph.
      actions: how to issue each kind of task.
      interrupt: ends waits of the actions for what may never come, in steps
        from this number on: one of them has failed. Called by any thread.
      reset: takes interrupts back, once nothing of those steps runs any more.
    """
    self._graph = graph
    self._actions = actions
    self._interrupt = interrupt
    self._reset = reset
    self._caller_tasks: list[Task] = []
    self._host_tasks: list[Task] = []
    for task in graph.tasks:
      by_host = graph.host_thread_issues(task)
      (self._host_tasks if by_host else self._caller_tasks).append(task)
    self._changed = threading.Condition()
    self._host = Worker("host")
    self._waiters = {
      lane: Worker(lane) for lane in (Lane.DEVICE, Lane.D2H, Lane.H2D)
    }
    self._lane_free_s = dict.fromkeys(Lane, 0.0)
    self._recent: collections.deque[StepRun] = collections.deque(
      maxlen=TIMELINE_STEPS
    )
    self._closed = False

  def run(self, step: Step) -> StepRun:
    """Starts a step; returns when everything the caller issues is issued.

    Raises:
      StepError: if an earlier step failed, or this one did while its tasks
        were issued.
      RuntimeError: if the executor is closed.
    """
    self.raise_if_failed()
    if self._closed:
      raise RuntimeError("the trainer is closed; make a new one")
    try:
      run = self._register(step)
      self._host.submit(lambda: self._issue_all(self._host_tasks, run))
      self._issue_all(self._caller_tasks, run)
    except BaseException as error:  # an interrupt, anywhere in between
      self._give_up(step, error)
      raise
    run.dispatched = True
    self.raise_if_failed()
    return run

  def has(self, step: Step) -> bool:
    """Says whether a step was begun, as far as it is remembered."""
    return any(run.step is step for run in list(self._recent))

  def drain(self) -> None:
    """Waits for all steps.

    Raises:
      StepError: if one of them failed.
    """
    if self._recent:
      self._recent[-1].wait_ended()
    self.raise_if_failed()

  def raise_if_failed(self) -> None:
    """Raises the failure of a step, if there is one, until it is forgotten."""
    if not any(run.failure for run in self._recent):
      return
    self.settle()  # earlier steps may still end, or fail as well
    raise next(run.failure for run in self._recent if run.failure)

  def forget_failure(self) -> None:
    """Lets steps go on, after a failure that was dealt with."""
    self.settle()
    self._reset()  # first: interrupted, this must be done again
    good = [run for run in self._recent if run.failure is None]
    self._recent = collections.deque(good, maxlen=TIMELINE_STEPS)

  def settle(self) -> None:
    """Waits until nothing works on a step any more, failed or not."""
    if not self._closed:
      for worker in (self._host, *self._waiters.values()):
        idle = threading.Event()
        worker.submit(idle.set)
        idle.wait()
    for run in self._recent:
      if run.failure is not None:
        run.step.wait_for_backward()
        run.step.release()

  def timeline(self) -> Timeline:
    """Returns the spans of the newest steps."""
    return Timeline(
      span for run in list(self._recent) for span in run.timeline().spans
    )

  def times(self, after_s: float) -> list[StepTimes]:
    """Returns the times of recent steps that have ended.

    Args:
      after_s: those that were begun after this time.
    """
    recent = [run for run in self._recent if run.begun_s > after_s]
    times = [run.times() for run in recent if run.failure is None]
    return [x for x in times if x is not None]

  def close(self) -> None:
    """Ends the threads after what was issued; may be called again.

    May be called by any thread, the executor's own included, since that is
    where the garbage collector may run.
    """
    if self._closed:
      return
    self._closed = True
    for run in list(self._recent):
      if not run.dispatched:
        self._give_up(run.step, RuntimeError("closed before it was issued"))
    workers = (self._host, *self._waiters.values())
    self._host.submit(self._stop_waiters)  # after what the host still issues
    self._host.stop()
    if not any(worker.is_current for worker in workers):
      for worker in workers:
        worker.join()

  def _stop_waiters(self) -> None:
    for waiter in self._waiters.values():
      waiter.stop()

  def _register(self, step: Step) -> StepRun:
    with self._changed:
      previous = self._recent[-1] if self._recent else None
      run = StepRun(self._graph, step, previous, self._changed)
      self._recent.append(run)
    return run

  def _issue_all(self, tasks: list[Task], run: StepRun) -> None:
    for task in tasks:
      try:
        run.wait_until_ready(task)
        self._issue(task, run)
      except StepError:
        return
      except Exception as error:
        self._fail(task, run, error)
        return

  def _issue(self, task: Task, run: StepRun) -> None:
    issued_s = time.perf_counter()
    wait = self._actions[task.kind](task, run.step)
    if wait is None:
      self._done(task, run, issued_s)
      return
    run.issued(task)

    def complete() -> None:
      if task.kind is TaskKind.VALIDATE and run.failure is not None:
        return  # or it would let a step that has failed change the state
      try:
        wait()
      except Exception as error:
        self._fail(task, run, error)
      else:
        self._done(task, run, issued_s)

    self._waiters[task.lane].submit(complete)

  def _done(self, task: Task, run: StepRun, issued_s: float) -> None:
    self._lane_free_s[task.lane] = run.done(
      task, issued_s, self._lane_free_s[task.lane]
    )

  def _give_up(self, step: Step, error: BaseException) -> None:
    """Fails a step of which not everything was issued."""
    for run in list(self._recent):
      if run.step is step and not run.dispatched:
        run.dispatched = True
        self._fail(self._caller_tasks[0], run, error)

  def _fail(self, task: Task, run: StepRun, error: BaseException) -> None:
    """Stops a step and those after it, which build on it."""
    failure = StepError(run.step, task)
    failure.__cause__ = error
    with self._changed:
      runs = list(self._recent)
      for later in runs[runs.index(run) :]:
        later.fail(failure)
    # After that: a wait that ends so is not what failed first.
    self._interrupt(run.step.number)
