"""Faults in tests of speculation: where they come, and how far updates are."""

import dataclasses
import threading

from sojax.graph.graph import TaskKind
from tests.speculating import spiking_batches, trainer

K = TaskKind
LIMIT_S = 120
"""After so long a test hangs."""

FAILING = 2
"""The step that fails."""

NUM_STEPS = 6
LEAVING = {
  "spike": {"spikes": (FAILING,)},
  "infinite": {"infinite": (FAILING,)},
}


class Fault(RuntimeError):
  """What the tests raise."""


def within_limit(function):
  """Calls a function in a thread, and returns what it does."""
  outcome = []

  def call():
    try:
      outcome.append((function(), None))
    except BaseException as error:
      outcome.append((None, error))

  thread = threading.Thread(target=call, daemon=True)
  thread.start()
  thread.join(LIMIT_S)
  assert not thread.is_alive(), "it hangs"
  result, error = outcome[0]
  if error is not None:
    raise error
  return result


def data_of(step_kind):
  """Six batches; the one of the step that fails is of a kind."""
  return spiking_batches(NUM_STEPS, **LEAVING.get(step_kind, {}))


def start(plan, **changes):
  """A trainer of which only spikes are clipped."""
  plan = {"speculation": "record3", "speculate": "always", **plan}
  return trainer(plan, **{"precision": "bf16", "clip_norm": 50.0, **changes})


def run_of(ours, step):
  (run,) = (r for r in ours._executor._recent if r.step is step)
  return run


def is_ahead(ours):
  """Returns a test of tasks: those that run before Validate does."""
  (validate,) = (
    t.index for t in ours.graph.tasks if t.kind is TaskKind.VALIDATE
  )
  kinds = TaskKind.HOST_UPDATE, TaskKind.WEIGHT_IN
  return lambda task: task.kind in kinds and task.index < validate


def hold_validate(ours):
  """Makes each Validate wait for updates ahead, and what they send."""
  actions = ours._executor._actions
  validate, ahead = actions[TaskKind.VALIDATE], is_ahead(ours)

  def held(task, step):
    wait = validate(task, step)
    run = run_of(ours, step)

    def after_updates():
      run.wait_done(ahead)
      wait()

    return after_updates

  actions[TaskKind.VALIDATE] = held


class FailingPool:
  """Makes an operation of a pool fail, before it begins or when it has ended.

  For as long as it is open.
  """

  def __init__(self, pool, operation, where):
    self._pool, self._operation, self._where = pool, operation, where

  def __enter__(self):
    submit = self._pool.submit

    class FailingCompletion:
      def __init__(self, completion):
        self._completion = completion

      def wait(self):
        self._completion.wait()
        raise Fault("wait")

    def failing(operation):
      if not isinstance(operation, self._operation):
        return submit(operation)
      if self._where == "submit":
        raise Fault("submit")
      return FailingCompletion(submit(operation))

    self._pool.submit = failing

  def __exit__(self, *exc_info):
    del self._pool.submit


@dataclasses.dataclass
class Case:
  """A fault in the third step.

  Attributes:
    kind: of the task that fails.
    where: "issue"; "wait"; or "submit", "end" of an operation of the pool.
    intact: whether the state is the one before the step afterwards.
    pick: the bucket whose task fails; or the stage.
    step_kind: of the step, and so of its settling.
    ahead: buckets whose update has ended when the fault comes.
    operation: of the pool, that fails.
    plan: switches.
  """

  kind: TaskKind
  where: str
  intact: bool
  pick: int | None = None
  step_kind: str = "normal"
  ahead: tuple[int, ...] = ()
  operation: type | None = None
  plan: dict = dataclasses.field(default_factory=dict)

  def __str__(self):
    parts = [self.kind, self.where, self.step_kind]
    parts += [] if self.operation is None else [self.operation.__name__]
    return "-".join([*map(str, parts), *map(str, self.plan.values())])


def break_once(ours, case):
  """Puts the fault of a case into its step."""
  actions = ours._executor._actions
  action, ahead = actions[case.kind], is_ahead(ours)
  buckets = [b.index for b in ours.layout.updated_by_host]
  of_bucket = case.kind not in (K.BACKWARD, K.VALIDATE, K.HOST_SCALARS)
  pick = case.pick
  if of_bucket and pick is not None:
    pick = buckets[pick]
  waited_for = {buckets[i] for i in case.ahead}

  def is_it(task, step):
    mine = task.bucket if of_bucket else task.stage
    return step.number == FAILING and (pick is None or pick == mine)

  def let_run_ahead(step):
    run_of(ours, step).wait_done(
      lambda x: x.kind is K.HOST_UPDATE and ahead(x) and x.bucket in waited_for
    )

  def failing(task, step):
    if not is_it(task, step):
      return action(task, step)
    actions[case.kind] = action
    if case.operation is not None:
      pool = ours._parts._pool
      with FailingPool(pool, case.operation, case.where):
        return action(task, step)
    if case.where == "issue":
      let_run_ahead(step)
      raise Fault(task.name)
    wait = action(task, step)
    assert wait is not None

    def fail():
      wait()
      let_run_ahead(step)
      raise Fault(task.name)

    if case.kind is not K.VALIDATE:
      return fail

    def fail_before_the_verdict():
      let_run_ahead(step)
      raise Fault(task.name)

    return fail_before_the_verdict

  actions[case.kind] = failing
