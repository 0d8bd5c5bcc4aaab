"""Ctrl-C anywhere in the caller's thread, while updates run ahead.

Oracle: the bits of a run that waits for validation and is not interrupted.
"""

import linecache
import sys

import pytest

import sojax
from sojax import trainer as facade
from sojax.graph.graph import TaskKind
from sojax.runtime import (
  compute,
  executor,
  run,
  stepper,
  updates,
  validation,
)
from sojax.runtime.speculation import NormWatch
from tests.speculating import let_all_run_ahead, spiking_batches, trainer
from tests.speculation_faults import Fault, within_limit
from tests.training import assert_same_bits, state_of

FILES = {
  module.__file__
  for module in (facade, compute, executor, run, stepper, updates, validation)
}
NUM_STEPS = 12


class Interruption:
  """Raises KeyboardInterrupt before a line of our code in this thread.

  Not where a lock is released, at the end of a `with`: there Python itself is
  not safe from interrupts.

  Attributes:
    num_lines: lines that were run while it was open.
  """

  def __init__(self, at_line=None):
    self._at_line = at_line
    self.num_lines = 0

  def __enter__(self):
    sys.settrace(self._called)
    return self

  def __exit__(self, *exc_info):
    sys.settrace(None)

  def _called(self, frame, event, arg):
    del event, arg
    return self._ran if frame.f_code.co_filename in FILES else None

  def _ran(self, frame, event, arg):
    del arg
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if event == "line" and not code.lstrip().startswith("with "):
      self.num_lines += 1
      if self.num_lines == self._at_line:
        raise KeyboardInterrupt
    return self._ran


def start(**plan):
  """A trainer of which every update runs ahead."""
  plan = {"speculation": "record3", "speculate": "always", **plan}
  ours = trainer(plan, precision="bf16", clip_norm=1.7)
  let_all_run_ahead(ours)
  return ours


@pytest.fixture(autouse=True)
def no_norm_ends_speculation(monkeypatch):
  monkeypatch.setattr(NormWatch, "objection", lambda *args: None)


def data_of_a_run():
  return spiking_batches(NUM_STEPS, spikes=(3, 7), infinite=(5, 9))


@pytest.fixture(scope="module")
def undisturbed():
  with trainer({}, precision="bf16", clip_norm=1.7) as theirs:
    for batch in data_of_a_run():
      theirs.step(batch)
    return state_of(theirs)


def recover(ours, directory):
  """What a loop does after an interrupt. Returns whether it had to restore."""
  for _ in range(3):
    try:
      ours.drain()
      return False
    except sojax.StepError as error:
      if not error.intact:
        ours.restore(directory)
        return True
  raise AssertionError("a failure is raised again and again")


def take_steps(ours, call, lines, directory):
  """Takes all steps, each of which is interrupted some times first.

  Returns how many interrupts there were.
  """
  data = data_of_a_run()
  num_interrupts = 0
  lines = iter(lines)
  while ours.num_steps < len(data):
    ours.save(directory, keep=1)
    for line in (next(lines, None), next(lines, None)):
      if line is None or ours.num_steps == len(data):
        continue
      try:
        with Interruption(line):
          call(data[ours.num_steps])
      except KeyboardInterrupt:
        num_interrupts += 1
        recover(ours, directory)
    if ours.num_steps < len(data):
      ours.step(data[ours.num_steps])
    ours.drain()
  return num_interrupts


def spread(count, num_lines):
  return [1 + i * num_lines // count for i in range(count)]


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize(
  "plan", [{}, {"weights": "flow"}, {"gradients_out": "callback"}], ids=str
)
def test_an_interrupted_step_is_taken_once_or_not_at_all(
  plan, offset, tmp_path, undisturbed
):
  def check():
    with start(**plan, ring_slots=1) as ours, start(**plan) as another:

      def step(batch):
        ours.step(batch)
        ours.drain()

      with Interruption() as counting:
        another.step(data_of_a_run()[0])
        another.drain()
      lines = [x + offset for x in spread(2 * NUM_STEPS, counting.num_lines)]
      assert take_steps(ours, step, lines, tmp_path) > NUM_STEPS
      return state_of(ours)

  assert_same_bits(within_limit(check), undisturbed)


def fail_after_updates(ours, batch):
  """Leaves a step that has failed, with every update ahead."""
  actions = ours._executor._actions
  validate = actions[TaskKind.VALIDATE]

  def failing(task, step):
    wait = validate(task, step)
    (under_way,) = (r for r in ours._executor._recent if r.step is step)

    def fail():
      under_way.wait_done(
        lambda x: x.kind is TaskKind.HOST_UPDATE and x.index < task.index
      )
      raise Fault

    del wait
    return fail

  actions[TaskKind.VALIDATE] = failing
  try:
    metrics = ours.step(batch)
    with pytest.raises(sojax.StepError):
      _ = metrics.grad_norm
  finally:
    actions[TaskKind.VALIDATE] = validate


@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_a_failure_whose_handling_is_interrupted_is_not_forgotten(
  weights, tmp_path, undisturbed
):
  """Each line that handles it is the last one of some attempt."""
  data = data_of_a_run()

  def check():
    with start(ring_slots=1, weights=weights) as ours:
      for batch in data[:2]:
        ours.step(batch)
      before = state_of(ours)
      ours.save(tmp_path)
      fail_after_updates(ours, data[2])
      with Interruption() as counting, pytest.raises(sojax.StepError):
        ours.drain()
      assert counting.num_lines > 40
      restored = set()
      for line in range(1, counting.num_lines + 1):
        fail_after_updates(ours, data[2])
        with pytest.raises(KeyboardInterrupt), Interruption(line):
          ours.drain()
        restored.add(recover(ours, tmp_path))
        assert_same_bits(state_of(ours), before)
      assert restored == {True, False}
      for batch in data[2:]:
        ours.step(batch)
      return state_of(ours)

  assert_same_bits(within_limit(check), undisturbed)
