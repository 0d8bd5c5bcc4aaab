"""Failures while updates have run ahead of validation: nothing hangs or stays.

Oracle: the bits of a run that waits for validation and that nothing disturbs.
"""

import dataclasses
import gc
import os
import threading

import pytest

import sojax
from sojax.graph.graph import TaskKind
from sojax.host.arena import Arena
from sojax.host.operations import AdamwStep, Finish, RecordStep, Redo, Undo
from sojax.runtime import parts
from sojax.runtime.speculation import NormWatch
from tests.speculating import SCHEMES
from tests.speculation_faults import (
  FAILING,
  Case,
  FailingPool,
  Fault,
  break_once,
  data_of,
  hold_validate,
  start,
  within_limit,
)
from tests.training import assert_same_bits, state_of

WEIGHTS = ("stationary", "flow")
TRANSPORTS = ("dma", "callback")


@pytest.fixture(scope="module")
def undisturbed():
  """The states at the end of runs that wait, by the kind of a step."""
  states = {}

  def find(step_kind):
    if step_kind not in states:
      with start({"speculation": "wait"}) as theirs:
        metrics = [theirs.step(batch) for batch in data_of(step_kind)]
        states[step_kind] = state_of(theirs)
        failing = metrics[FAILING]
        assert failing.clipped is (step_kind == "spike")
        assert failing.skipped is (step_kind == "infinite")
        assert not any(m.clipped for m in metrics[FAILING + 1 :])
    return states[step_kind]

  return find


@pytest.fixture(autouse=True)
def no_norm_ends_speculation(monkeypatch):
  monkeypatch.setattr(NormWatch, "objection", lambda *args: None)


K = TaskKind
NO_ROOM = {"escape_bytes_per_param": 0}
PINGPONG = {"speculation": "pingpong"}
CASES = [
  # Before Validate: the first bucket has been updated, or all of them.
  Case(K.BACKWARD, "issue", True, pick=0, ahead=(0,)),
  Case(K.BACKWARD, "wait", True, pick=0, ahead=(0,)),
  Case(K.BACKWARD, "wait", True, pick=1, ahead=(0, 1), plan=PINGPONG),
  Case(K.GRAD_OUT, "issue", True, pick=-1, ahead=(0, 1)),
  Case(K.GRAD_OUT, "wait", True, pick=-1, ahead=(0, 1)),
  Case(K.VALIDATE, "issue", True, ahead=(0, 1, -1)),
  Case(K.VALIDATE, "wait", True, ahead=(0, 1, -1)),
  Case(K.VALIDATE, "wait", True, ahead=(0, 1, -1), plan=NO_ROOM),
  Case(K.VALIDATE, "wait", True, step_kind="spike", ahead=(0, 1, -1)),
  Case(K.VALIDATE, "wait", True, step_kind="infinite", ahead=(0, 1, -1)),
  Case(K.VALIDATE, "wait", True, ahead=(0, -1), plan=PINGPONG),
  Case(K.VALIDATE, "wait", True, ahead=(0, -1), plan={"accumulate": "host"}),
  Case(K.HOST_UPDATE, "issue", True, pick=0),
  Case(K.HOST_UPDATE, "issue", True, pick=2, ahead=(0, 1)),
  Case(K.HOST_UPDATE, "submit", False, pick=2, operation=RecordStep),
  Case(K.HOST_UPDATE, "end", False, pick=2, operation=RecordStep),
  Case(K.HOST_UPDATE, "end", False, pick=2, operation=AdamwStep, plan=PINGPONG),
  Case(K.HOST_SCALARS, "issue", True),
  # After it.
  Case(K.HOST_SETTLE, "issue", False, pick=1),
  Case(K.HOST_SETTLE, "submit", False, operation=Finish, plan=NO_ROOM),
  Case(K.HOST_SETTLE, "end", False, operation=Finish, plan=NO_ROOM),
  Case(K.HOST_SETTLE, "issue", False, pick=1, step_kind="spike"),
  Case(K.HOST_SETTLE, "submit", False, step_kind="spike", operation=Redo),
  Case(K.HOST_SETTLE, "end", False, step_kind="spike", operation=Redo),
  # A step that is skipped has not begun to change the state for good.
  Case(K.HOST_SETTLE, "issue", True, pick=1, step_kind="infinite"),
  Case(K.HOST_SETTLE, "submit", False, step_kind="infinite", operation=Undo),
  Case(K.HOST_SETTLE, "end", False, step_kind="infinite", operation=Undo),
]
ON_A_WAY = [
  Case(K.WEIGHT_IN, "issue", True, pick=0, ahead=(0,)),
  Case(K.WEIGHT_IN, "wait", True, pick=0, ahead=(0,)),
  Case(K.WEIGHT_RESEND, "issue", False, pick=1),
  Case(K.WEIGHT_RESEND, "issue", False, pick=1, step_kind="spike"),
  Case(K.WEIGHT_RESEND, "wait", False, pick=1, step_kind="spike"),
  Case(K.WEIGHT_RESEND, "issue", True, pick=1, step_kind="infinite"),
  Case(K.WEIGHT_RESEND, "wait", True, pick=1, step_kind="infinite"),
]


def assert_restore_is_demanded(ours, batch, directory):
  for call in (
    lambda: ours.step(batch),
    ours.drain,
    lambda: ours.save(directory),
    lambda: ours.evaluate(batch),
    ours.sync_model,
  ):
    with pytest.raises(sojax.StepError, match="restore a checkpoint"):
      call()


def check(case, plan, directory, theirs):
  """Fails in the third step, and goes on after it."""
  data = data_of(case.step_kind)
  with start({**case.plan, **plan, "ring_slots": 1}) as ours:
    for batch in data[:FAILING]:
      ours.step(batch)
    before = state_of(ours)
    ours.save(directory)
    hold_validate(ours)
    break_once(ours, case)
    with pytest.raises(sojax.StepError) as caught:
      ours.step(data[FAILING])
      ours.drain()
    error = caught.value
    assert isinstance(error.__cause__, Fault)
    assert error.step == FAILING and error.task.startswith(case.kind)
    assert error.intact is case.intact
    ran = error.data.speculation.ran
    assert len(ran) >= len(case.ahead)
    if case.intact:
      assert "the state is the one before it" in str(error)
      assert_same_bits(state_of(ours), before)
    else:
      assert_restore_is_demanded(ours, data[FAILING], directory)
      ours.restore(directory)
    metrics = [ours.step(batch) for batch in data[FAILING:]]
    assert_same_bits(state_of(ours), theirs)
    assert all(m.speculated for m in metrics)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_failure_while_updates_are_ahead(
  case, weights, transport, tmp_path, undisturbed
):
  plan = {"weights": weights, "gradients_out": transport}
  theirs = undisturbed(case.step_kind)
  within_limit(lambda: check(case, plan, tmp_path, theirs))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", ON_A_WAY, ids=str)
def test_a_failure_on_the_way_of_new_weights(
  case, transport, tmp_path, undisturbed
):
  plan = {"gradients_out": transport}
  theirs = undisturbed(case.step_kind)
  within_limit(lambda: check(case, plan, tmp_path, theirs))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_taking_back_can_fail_too(weights, tmp_path, undisturbed):
  data = data_of("normal")

  def check_it():
    with start({"weights": weights}) as ours:
      for batch in data[:FAILING]:
        ours.step(batch)
      ours.save(tmp_path)
      case = Case(K.VALIDATE, "wait", True, ahead=(0, -1))
      break_once(ours, case)
      with FailingPool(ours._parts._pool, Undo, "submit"):
        with pytest.raises(sojax.StepError) as caught:
          ours.step(data[FAILING])
          ours.drain()
      assert caught.value.task.startswith("validate")
      assert not caught.value.intact
      assert [str(x) for x in caught.value.__cause__.exceptions] == [
        "validate",
        "submit",
      ]
      assert_restore_is_demanded(ours, data[FAILING], tmp_path)
      ours.restore(tmp_path)
      for batch in data[FAILING:]:
        ours.step(batch)
      return state_of(ours)

  ended = within_limit(check_it)
  assert_same_bits(ended, undisturbed("normal"))


def test_a_schedule_may_fail_and_go_on(tmp_path, undisturbed):
  """The optimizer's own code raises, on the host's thread."""
  del tmp_path
  raising = threading.Event()
  data = data_of("normal")

  def check_it():
    with start({}) as ours, start({}) as never_fails:
      for batch in data[:FAILING]:
        ours.step(batch)
      before = state_of(ours)
      groups = ours._parts._validation._groups

      def failing(schedule):
        def evaluate(count):
          if raising.is_set():
            raise Fault(f"no learning rate at {count}")
          return schedule(count)

        return evaluate

      ours._parts._validation._groups = tuple(
        dataclasses.replace(g, learning_rate=failing(g.learning_rate))
        for g in groups
      )
      raising.set()
      for _ in range(2):
        with pytest.raises(sojax.StepError, match="host_scalars") as caught:
          ours.step(data[FAILING])
          ours.drain()
        assert caught.value.intact
        assert "no learning rate at 2" in str(caught.value.__cause__)
        assert_same_bits(state_of(ours), before)
      raising.clear()
      for batch in data[FAILING:]:
        ours.step(batch)
      for batch in data:
        never_fails.step(batch)
      assert_same_bits(state_of(never_fails), undisturbed("normal"))
      return state_of(ours)

  assert_same_bits(within_limit(check_it), undisturbed("normal"))


def test_steps_that_fail_again_and_again_lose_nothing(undisturbed):
  """Whatever a failure keeps, it would run out."""
  data = data_of("normal")

  def check_it():
    with start({"ring_slots": 1}) as ours:
      for batch in data[:FAILING]:
        ours.step(batch)
      before = state_of(ours)
      for ahead in ((0,), (0, 1), (0, -1)) * 3:
        break_once(ours, Case(K.VALIDATE, "wait", True, ahead=ahead))
        with pytest.raises(sojax.StepError):
          ours.step(data[FAILING])
          ours.drain()
        assert_same_bits(state_of(ours), before)
      for batch in data[FAILING:]:
        ours.step(batch)
      return state_of(ours)

  assert_same_bits(within_limit(check_it), undisturbed("normal"))


def num_threads():
  """Threads of this process, those without Python included."""
  return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("error", [MemoryError, OSError])
@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_records_that_get_no_memory_refuse_the_trainer(
  scheme, failing, error, monkeypatch
):
  """The first arena is the state's; then come codes or copies, and escapes."""
  made = []

  class NoRoom(Arena):
    def __init__(self, *args, **kwargs):
      made.append(self)
      if len(made) == failing + 1:
        raise error("no room for records")
      super().__init__(*args, **kwargs)

  start({"speculation": scheme}).close()  # starts what jax keeps
  gc.collect()
  before = num_threads()
  monkeypatch.setattr(parts, "Arena", NoRoom)
  for _ in range(3):
    made.clear()
    with pytest.raises(error, match="no room for records"):
      start({"speculation": scheme})
  gc.collect()
  assert num_threads() <= before  # some of earlier tests may end late


def test_a_skipped_step_that_fails_counts_once(undisturbed):
  """Two skips in a row would stop training."""
  data = data_of("infinite")

  def check_it():
    with start({}, max_consecutive_skips=2) as ours:
      for batch in data[:FAILING]:
        ours.step(batch)
      case = Case(K.WEIGHT_RESEND, "issue", True, pick=1)
      break_once(ours, case)
      with pytest.raises(sojax.StepError, match="weight_resend"):
        ours.step(data[FAILING])
        ours.drain()
      for batch in data[FAILING:]:
        ours.step(batch)
      return state_of(ours)

  assert_same_bits(within_limit(check_it), undisturbed("infinite"))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
  "case",
  [
    Case(K.VALIDATE, "wait", True, ahead=(0, 1, -1)),
    Case(K.GRAD_OUT, "wait", True, pick=-1, ahead=(0, 1)),
    Case(K.HOST_SETTLE, "issue", True, pick=-1, step_kind="infinite"),
    Case(K.HOST_SETTLE, "issue", True, pick=0, step_kind="infinite"),
  ],
  ids=str,
)
def test_a_failure_while_the_next_step_is_under_way(
  case, weights, transport, undisturbed
):
  """Steps are begun as fast as they can be; nobody waits in between."""
  data = data_of(case.step_kind)
  plan = {"weights": weights, "gradients_out": transport, "ring_slots": 1}

  def check_it():
    with start(plan) as ours:
      hold_validate(ours)
      break_once(ours, case)
      with pytest.raises(sojax.StepError) as caught:
        for batch in data:
          ours.step(batch)
        ours.drain()
      assert caught.value.step == FAILING and caught.value.intact
      for batch in data[ours.num_steps :]:
        ours.step(batch)
      return state_of(ours)

  assert_same_bits(within_limit(check_it), undisturbed(case.step_kind))
