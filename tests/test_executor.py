"""The executor, with actions that the test controls; no device, no timing."""

import queue
import threading

import jax
import jax.numpy as jnp
import pytest

from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.programs.validate import ScaleState
from sojax.runtime.executor import Executor
from sojax.runtime.run import StepError
from sojax.runtime.step import Step

K = TaskKind


def graph():
  """Two stages, one bucket each, the second updated on the device."""
  tasks = [
    Task(index=0, kind=K.FORWARD, lane=Lane.DEVICE, stage=0, prev_deps=(4, 8)),
    Task(index=1, kind=K.BACKWARD, lane=Lane.DEVICE, stage=1, deps=(0,)),
    Task(index=2, kind=K.GRAD_OUT, lane=Lane.D2H, bucket=0, deps=(1,)),
    Task(index=3, kind=K.BACKWARD, lane=Lane.DEVICE, stage=0, deps=(1,)),
    Task(
      index=4,
      kind=K.VALIDATE,
      lane=Lane.DEVICE,
      deps=(1, 3),
      prev_deps=(4,),
    ),
    Task(index=5, kind=K.GRAD_OUT, lane=Lane.D2H, bucket=1, deps=(3,)),
    Task(index=6, kind=K.HOST_UPDATE, lane=Lane.HOST, bucket=0, deps=(2, 4)),
    Task(index=7, kind=K.HOST_UPDATE, lane=Lane.HOST, bucket=1, deps=(5, 4)),
    Task(index=8, kind=K.WEIGHT_IN, lane=Lane.H2D, bucket=1, deps=(7,)),
  ]
  return StepGraph(tuple(tasks))


class Recorder:
  """Actions that log what happens, and fail or hold on request."""

  def __init__(self, fail_issue=(), fail_wait=(), hold=()):
    self.log: queue.SimpleQueue[tuple[str, int, int, str]] = queue.SimpleQueue()
    self.fail_issue = set(fail_issue)
    self.fail_wait = set(fail_wait)
    self.gates = {key: threading.Event() for key in hold}
    self.reached = {key: threading.Event() for key in hold}

  def actions(self):
    return dict.fromkeys(TaskKind, self.issue)

  def issue(self, task, step):
    key = (step.number, task.index)
    self._log("issue", key)
    if key in self.fail_issue:
      raise RuntimeError("broken on purpose")
    if task.kind is K.HOST_UPDATE:
      self._end(task, step, key)
      return None
    return lambda: self._end(task, step, key)

  def _end(self, task, step, key):
    if key in self.gates:
      self.reached[key].set()
      assert self.gates[key].wait(60)
    if key in self.fail_wait:
      raise RuntimeError("broken on purpose")
    if task.kind is K.VALIDATE:
      step.state_touched = True
    self._log("end", key)

  def _log(self, event, key):
    thread = threading.current_thread().name
    self.log.put((event, *key, thread))

  def events(self):
    found = []
    while not self.log.empty():
      found.append(self.log.get())
    return found


def step(number):
  one = jnp.ones(())
  return Step(number, (), (), ScaleState(one, one))


def run_steps(recorder, num_steps):
  executor = Executor(graph(), recorder.actions())
  try:
    for number in range(num_steps):
      executor.run(step(number))
    executor.drain()
    return executor.timeline()
  finally:
    executor.close()


def test_every_task_runs_once_and_after_what_it_waits_for():
  recorder = Recorder()
  run_steps(recorder, 5)
  events = recorder.events()
  place = {event[:3]: i for i, event in enumerate(events)}
  assert len(place) == len(events) == 5 * 9 * 2
  jax_ordered = (Lane.DEVICE, Lane.H2D)
  tasks = graph().tasks
  for number in range(5):
    for task in tasks:
      deps = [(number, dep) for dep in task.deps]
      deps += [(number - 1, dep) for dep in task.prev_deps if number]
      for when, dep in deps:
        by_arrays = (
          task.lane in (Lane.DEVICE, Lane.D2H)
          and tasks[dep].lane in jax_ordered
          and not task.kind is tasks[dep].kind is K.VALIDATE
        )
        before = ("issue" if by_arrays else "end", when, dep)
        assert place[before] < place["issue", number, task.index]


def test_each_lane_keeps_the_schedule_order():
  recorder = Recorder()
  run_steps(recorder, 4)
  ends = [e[1:3] for e in recorder.events() if e[0] == "end"]
  for lane in Lane:
    indices = {t.index for t in graph().tasks if t.lane is lane}
    on_lane = [key for key in ends if key[1] in indices]
    assert on_lane == sorted(on_lane)


def test_the_caller_dispatches_all_programs():
  recorder = Recorder()
  run_steps(recorder, 3)
  caller = threading.current_thread().name
  for event, _, index, thread in recorder.events():
    if event == "issue":
      task = graph().tasks[index]
      by_caller = task.lane in (Lane.DEVICE, Lane.D2H)
      assert (thread == caller) == by_caller, task.name


def test_run_returns_while_the_host_still_works():
  recorder = Recorder(hold=[(0, 6)])
  executor = Executor(graph(), recorder.actions())
  run = executor.run(step(0))
  assert recorder.reached[0, 6].wait(60)
  with pytest.raises(AssertionError):
    raise_if_done(run)
  recorder.gates[0, 6].set()
  run.wait_done()
  executor.close()


def raise_if_done(run):
  assert any(span.name.startswith("weight_in") for span in run.timeline().spans)


def test_the_timeline_has_every_span_within_its_lane_in_order():
  timeline = run_steps(Recorder(), 3)
  assert len(timeline.spans) == 3 * 9
  for lane in Lane:
    spans = [s for s in timeline.spans if s.lane == lane]
    for before, after in zip(spans, spans[1:], strict=False):
      assert before.end_s <= after.start_s


def test_drain_raises_a_failure_though_later_steps_have_ended():
  recorder = Recorder(hold=[(1, 8)], fail_wait=[(1, 8)])
  executor = Executor(graph(), recorder.actions())
  for number in range(4):
    executor.run(step(number))
  all_issued = threading.Event()
  executor._host.submit(all_issued.set)
  assert all_issued.wait(60)
  recorder.gates[1, 8].set()
  executor.settle()
  with pytest.raises(StepError, match="step 1 failed in .weight_in"):
    executor.drain()
  executor.close()


@pytest.mark.parametrize("index", range(9))
@pytest.mark.parametrize("where", ["fail_issue", "fail_wait"])
def test_a_failure_anywhere_stops_the_step_and_names_it(index, where):
  recorder = Recorder(**{where: [(1, index)]})
  executor = Executor(graph(), recorder.actions())
  executor.run(step(0))
  with pytest.raises(StepError) as caught:
    for number in range(1, 4):
      executor.run(step(number))
    executor.drain()
  assert caught.value.step == 1
  assert caught.value.task == graph().tasks[index].name
  assert isinstance(caught.value.__cause__, RuntimeError)
  ends = {e[1:3] for e in recorder.events() if e[0] == "end"}
  assert {(0, i) for i in range(9)} <= ends, "the step before lost work"
  before_validate = (1, 4) not in ends
  assert caught.value.intact == before_validate
  executor.close()


def test_steps_go_on_after_a_failure_that_left_the_state_intact():
  recorder = Recorder(fail_issue=[(1, 3)])
  executor = Executor(graph(), recorder.actions())
  executor.run(step(0))
  with pytest.raises(StepError, match="the state is the one before it"):
    executor.run(step(1))
  recorder.fail_issue.clear()
  with pytest.raises(StepError):  # until it was dealt with
    executor.run(step(1))
  executor.forget_failure()
  executor.run(step(1)).wait_done()
  executor.drain()
  executor.close()


def test_a_failure_that_changed_the_state_stays():
  recorder = Recorder(fail_issue=[(0, 6)])
  executor = Executor(graph(), recorder.actions())
  for _ in range(2):
    with pytest.raises(StepError, match="restore a checkpoint"):
      executor.run(step(0))
      executor.drain()
  executor.forget_failure()
  recorder.fail_issue.clear()
  executor.run(step(1)).wait_done()
  executor.close()


def test_metrics_of_a_failed_step_raise_and_of_the_one_before_do_not():
  recorder = Recorder(fail_wait=[(1, 1)])
  executor = Executor(graph(), recorder.actions())
  first = executor.run(step(0))
  first.wait_done()
  with pytest.raises(StepError):
    executor.run(step(1)).wait_done()
    executor.drain()
  first.wait_done()
  executor.close()


def test_an_interrupt_in_the_caller_is_raised_as_it_is():
  recorder = Recorder()
  actions = recorder.actions()

  def interrupted(task, step):
    raise KeyboardInterrupt

  actions[K.GRAD_OUT] = interrupted
  executor = Executor(graph(), actions)
  with pytest.raises(KeyboardInterrupt):
    executor.run(step(0))
  with pytest.raises(StepError) as caught:
    executor.drain()
  assert isinstance(caught.value.__cause__, KeyboardInterrupt)
  executor.close()


@pytest.mark.parametrize("where", ["_register", "_issue_all"])
def test_an_interrupt_between_tasks_hangs_nothing(where, monkeypatch):
  executor = Executor(graph(), Recorder().actions())
  method = getattr(executor, where)

  def interrupted(*args):
    if where == "_register":
      method(*args)
    raise KeyboardInterrupt

  monkeypatch.setattr(executor, where, interrupted)
  with pytest.raises(KeyboardInterrupt):
    executor.run(step(0))
  monkeypatch.undo()
  with pytest.raises(StepError):
    executor.drain()
  executor.forget_failure()
  executor.run(step(0)).wait_done()
  executor.close()


def test_the_failure_of_the_earlier_step_is_raised_though_noticed_later():
  """Step 0 has committed when step 1 fails; then its last transfer fails."""
  recorder = Recorder(hold=[(0, 8)], fail_wait=[(0, 8)], fail_issue=[(1, 1)])
  actions = recorder.actions()
  executor = Executor(graph(), actions)
  executor.run(step(0))
  assert recorder.reached[0, 8].wait(60)
  settle = executor.settle

  def settle_after_the_transfer():
    recorder.gates[0, 8].set()
    settle()

  executor.settle = settle_after_the_transfer
  with pytest.raises(StepError) as caught:
    executor.run(step(1))
  assert caught.value.step == 0
  assert not caught.value.intact
  executor.close()


def test_a_step_that_has_failed_is_not_validated():
  recorder = Recorder(fail_wait=[(0, 1)])
  executor = Executor(graph(), recorder.actions())
  with pytest.raises(StepError) as caught:
    executor.run(step(0))
    executor.drain()
  assert caught.value.intact
  assert ("end", 0, 4) not in {e[:3] for e in recorder.events()}
  executor.close()


def test_a_closed_executor_refuses_steps():
  executor = Executor(graph(), Recorder().actions())
  executor.run(step(0))
  executor.close()
  executor.close()
  assert len(executor.timeline().spans) == 9
  with pytest.raises(RuntimeError, match="closed; make a new one"):
    executor.run(step(1))


def test_close_may_be_called_by_its_own_threads():
  """The garbage collector runs wherever it likes."""
  recorder = Recorder()
  actions = recorder.actions()
  closed = threading.Event()

  def closing(task, step):
    executor.close()
    closed.set()
    return recorder.issue(task, step)

  actions[K.WEIGHT_IN] = closing
  executor = Executor(graph(), actions)
  threads = [executor._host, *executor._waiters.values()]
  executor.run(step(0))
  assert closed.wait(60)
  for worker in threads:
    worker._thread.join(60)
    assert not worker._thread.is_alive()


def test_a_span_starts_after_its_dependencies_noticed_late_or_not():
  """The transfer's end is noticed before that of the program it waits for."""
  recorder = Recorder(hold=[(0, 1)])
  actions = recorder.actions()
  transferred = threading.Event()

  def grad_out(task, step):
    recorder.issue(task, step)
    return transferred.set if task.bucket == 0 else lambda: None

  actions[K.GRAD_OUT] = grad_out
  executor = Executor(graph(), actions)
  run = executor.run(step(0))
  assert transferred.wait(60)
  recorder.gates[0, 1].set()
  run.wait_done()
  spans = {span.name: span for span in executor.timeline().spans}
  program, transfer = (
    spans["backward stage=1 micro=0"],
    spans["grad_out bucket=0 micro=0"],
  )
  assert transfer.start_s == min(program.end_s, transfer.end_s)
  executor.close()


def test_a_first_forward_does_not_count_as_busy_while_it_waits():
  """Its span starts after the transfer of the step before it has ended."""
  recorder = Recorder(hold=[(0, 8), (1, 0)])
  executor = Executor(graph(), recorder.actions())
  first = executor.run(step(0))
  assert recorder.reached[0, 8].wait(60)
  second = executor.run(step(1))
  recorder.gates[0, 8].set()
  first.wait_done()
  recorder.gates[1, 0].set()
  second.wait_done()
  spans = {(s.step, s.name): s for s in executor.timeline().spans}
  transfer = spans[0, "weight_in bucket=1"]
  assert spans[1, "forward stage=0 micro=0"].start_s >= transfer.end_s
  executor.close()


class _Program:
  """What a program returns that says when it has ended."""

  def __init__(self, log, error=None):
    self.log, self.error = log, error

  def block_until_ready(self):
    self.log.append("ended")
    if self.error is not None:
      raise self.error


@pytest.mark.parametrize(
  "error", [None, jax.errors.JaxRuntimeError("delivered to nobody")]
)
def test_a_backward_that_an_interrupt_left_alone_has_ended_before_a_reset(
  error,
):
  """Else its deliveries would come in the next step."""
  log = []
  recorder = Recorder()

  def backward(task, under_way):
    del task
    under_way.newest_backward = _Program(log, error)
    raise KeyboardInterrupt

  executor = Executor(
    graph(),
    {**recorder.actions(), K.BACKWARD: backward},
    reset=lambda: log.append("reset"),
  )
  try:
    with pytest.raises(KeyboardInterrupt):
      executor.run(step(0))
    executor.forget_failure()
    assert log == ["ended", "reset"]
  finally:
    executor.close()
