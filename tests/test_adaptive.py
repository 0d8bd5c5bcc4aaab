"""The choice between running ahead and waiting, by synthetic times.

Oracle: a machine whose times are given by a formula, worked by hand.
"""

import dataclasses
import math

import pytest

from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan
from sojax.runtime.adaptive import Policy, Speculator
from sojax.runtime.run import StepTimes
from tests.training import batches, trainer


@dataclasses.dataclass
class Machine:
  """Takes steps as a policy chooses, in seconds of a clock of its own.

  Attributes:
    compute_s: of a step, without updates.
    update_s: of all updates, S.
    backward_s: for which backward still runs when they could begin, B.
    record_ratio: what an update with a record takes, against a plain one.
    redo_ratio: what taking it again takes.
    contention_s: what a step is slower by if updates run ahead.
    idle_s: from the end of a step to the next one's beginning.
  """

  policy: Policy
  compute_s: float = 1.0
  update_s: float = 0.5
  backward_s: float = 0.4
  record_ratio: float = 1.2
  redo_ratio: float = 1.3
  contention_s: float = 0.0
  idle_s: float = 0.0
  clock_s: float = 0.0
  number: int = 0
  before: StepTimes | None = None
  reasons: list[str] = dataclasses.field(default_factory=list)

  def step(self, *, clipped=False, compile_s=0.0) -> bool:
    """Returns whether updates ran ahead."""
    choice = self.policy.choose()
    self.reasons.append(choice.reason)
    begun_s = self.clock_s + self.idle_s
    validated_s = begun_s + self.compute_s + compile_s
    first_grad_s = validated_s - self.backward_s
    if choice.ahead:
      validated_s += self.contention_s
      ahead_s = self.record_ratio * self.update_s
      ended_s = max(validated_s, first_grad_s + ahead_s)
      again_s = self.redo_ratio * self.update_s if clipped else 0.0
      ended_s += again_s
      update_s = ahead_s + again_s
    else:
      update_s = self.update_s
      ended_s = validated_s + update_s
    times = StepTimes(
      number=self.number,
      ahead=choice.ahead,
      clipped=clipped,
      begun_s=begun_s,
      first_grad_s=first_grad_s,
      validated_s=validated_s,
      ended_s=ended_s,
      update_s=update_s,
    )
    if self.before is not None:
      self.policy.observe(self.before, times)
    self.before = times
    self.clock_s = ended_s
    self.number += 1
    return choice.ahead

  def steps(self, count, **kwargs) -> list[bool]:
    return [self.step(**kwargs) for _ in range(count)]


def test_waiting_is_measured_first():
  """Three samples; the compile step is none, and the end of one is later."""
  machine = Machine(Policy())
  assert machine.steps(5) == [False] * 5
  assert machine.reasons == ["waits: to measure it"] * 5
  assert machine.step()


def test_it_goes_ahead_where_that_is_predicted_and_then_measured_to_be_faster():
  machine = Machine(Policy())
  machine.steps(5)
  assert all(machine.steps(200))
  # 1.5 - 0.5 + (0.6 - 0.4); measured it is the same.
  assert machine.reasons[5] == (
    "predicted 1.2 s a step ahead, 1.5 s waiting, 0% taken back"
  )
  assert machine.reasons[-1] == (
    "measured 1.2 s a step ahead, 1.5 s waiting, 0% taken back"
  )


def test_updates_that_backward_cannot_hide_wait():
  """There is nothing to overlap with, and a record costs something."""
  machine = Machine(Policy(), backward_s=0.0)
  assert not any(machine.steps(200))
  assert machine.reasons[-1] == (
    "waits: predicted 1.6 s a step ahead, 1.5 s waiting, 0% taken back"
  )


@pytest.mark.parametrize(("backward_s", "ahead"), [(0.09, False), (0.11, True)])
def test_the_gain_must_be_more_than_the_record(backward_s, ahead):
  """max(1.2 S - B, 0) < S with S = 0.5: B > 0.1."""
  machine = Machine(Policy(), backward_s=backward_s)
  machine.steps(5)
  assert machine.step() is ahead


def test_running_ahead_that_is_measured_to_lose_ends():
  """Backward is slower beside updates, which no formula knows."""
  machine = Machine(Policy(), contention_s=0.8)
  machine.steps(5)
  taken = machine.steps(30)
  num_ahead = taken.index(False)
  assert 3 <= num_ahead <= 8, "enough to measure it, and no more"
  assert machine.reasons[5 + num_ahead].startswith("waits: measured 1.8 s")


def test_pauses_double():
  machine = Machine(Policy(), contention_s=0.8)
  taken = "".join("a" if x else "w" for x in machine.steps(3000))
  pauses = [len(x) for x in taken.strip("w").split("a") if x]
  assert len(pauses) > 4
  first = pauses[0]
  assert 16 <= first <= 17
  for number, pause in enumerate(pauses):
    assert pause == first - 16 + min(16 * 2**number, 1024)


def test_a_pause_ends_in_another_measurement():
  """The machine has become another one meanwhile."""
  machine = Machine(Policy(), contention_s=0.8)
  machine.steps(12)
  machine.contention_s = 0.0
  taken = machine.steps(200)
  assert not all(taken) and all(taken[-150:])


@pytest.mark.parametrize(("period", "ahead"), [(10, True), (2, False)])
def test_the_rate_of_clipped_steps_counts_against_running_ahead(period, ahead):
  """Ahead takes 1.2 s and 0.65 s more where it is taken back; waiting 1.5 s:
  they are equal where 46 % are."""
  machine = Machine(Policy())
  taken = [machine.step(clipped=number % period == 0) for number in range(400)]
  share = sum(taken[-200:]) / 200
  assert share > 0.95 if ahead else share < 0.2


def test_steps_that_are_all_clipped_wait_and_say_why():
  machine = Machine(Policy())
  machine.steps(5)
  assert machine.step()
  machine.steps(40, clipped=True)
  assert not machine.step(clipped=True)
  assert machine.reasons[-1].startswith("waits: ")
  rate = machine.reasons[-1].split(", ")[-1]
  assert 95 <= int(rate.removesuffix("% taken back")) <= 100


def test_taking_back_is_expected_to_cost_another_update():
  """1.3 s where it stays, and 0.65 s more for a share that grows to 1."""
  machine = Machine(Policy(), backward_s=0.3)
  assert not any(machine.steps(30, clipped=True))
  assert machine.reasons[5] == (
    "waits: predicted 1.52 s a step ahead, 1.5 s waiting, 34% taken back"
  )


def test_the_rate_forgets():
  """Clipping at the start of training does not keep updates waiting."""
  machine = Machine(Policy())
  assert not any(machine.steps(50, clipped=True)[-20:])
  taken = machine.steps(80)
  assert all(taken[-30:])


@pytest.mark.parametrize("idle_s", [0.0, 100.0])
def test_time_between_steps_does_not_count(idle_s):
  machine = Machine(Policy(), idle_s=idle_s)
  machine.steps(5)
  assert all(machine.steps(50))
  assert machine.reasons[-1].startswith(
    "measured 1.2 s a step ahead, 1.5 s waiting"
  )


def test_idle_time_of_one_kind_only_does_not_count():
  """Evaluations fall between steps that wait, or between those ahead."""
  machine = Machine(Policy(), backward_s=0.0)
  machine.steps(5)
  machine.idle_s = 50.0
  assert not any(machine.steps(20)), "waiting has not become slower"
  machine = Machine(Policy())
  machine.steps(5)
  machine.idle_s = 50.0
  assert all(machine.steps(20)), "running ahead has not become slower"


def test_the_step_that_compiles_is_not_measured():
  machine = Machine(Policy(), backward_s=0.0)
  machine.step(compile_s=500.0)
  machine.steps(5)
  assert machine.reasons[-1].startswith(
    "waits: predicted 1.6 s a step ahead, 1.5"
  )


@dataclasses.dataclass
class Ended:
  """The steps that have ended, as an executor tells them."""

  times: list[StepTimes] = dataclasses.field(default_factory=list)

  def __call__(self, after_s):
    return [x for x in self.times if x.begun_s > after_s]

  def add(self, number, begun_s, step_s=1.5, *, ahead=False):
    self.times.append(
      StepTimes(
        number=number,
        ahead=ahead,
        clipped=False,
        begun_s=begun_s,
        first_grad_s=begun_s + 0.6,
        validated_s=begun_s + 1.0,
        ended_s=begun_s + step_s,
        update_s=0.5,
      )
    )


def speculator(**plan):
  config = TrainConfig(micro_batch=1, seq_len=1)
  return Speculator(Plan(speculation="record3", **plan), config, num_stages=4)


def test_a_speculator_tells_its_policy_of_each_pair_once():
  seen = []
  ours, ended = speculator(), Ended()
  ours._policy.observe = lambda x, y: seen.append((x.number, y.number))
  for number in range(6):
    ours.begin(ended)
    ended.add(number, 1.0 + 1.5 * number)
  ours.begin(ended)
  assert seen == [(n, n + 1) for n in range(5)]
  ours.begin(ended)
  assert len(seen) == 5


def test_a_step_that_was_taken_twice_is_no_pair_with_itself():
  """Step 3 failed, and was taken again."""
  seen = []
  ours, ended = speculator(), Ended()
  ours._policy.observe = lambda x, y: seen.append((x.number, y.number))
  for number in (0, 1, 2, 2, 3):
    ended.add(number, 1.0 + 1.5 * len(ended.times))
  ours.begin(ended)
  assert seen == [(0, 1), (1, 2), (2, 3)]


def test_a_speculator_begins_as_its_plan_says():
  ended = Ended()
  always = speculator(speculate="always").begin(ended)
  assert always.wanted and always.reason == "the plan says so"
  never = speculator(speculate="never").begin(ended)
  assert not never.wanted and never.reason == "waits: the plan says so"
  adaptive = speculator().begin(ended)
  assert not adaptive.wanted and adaptive.reason == "waits: to measure it"
  assert adaptive.why_not(1.0) == adaptive.reason
  assert always.why_not(1.0) is None


def test_no_time_is_negative_or_not_finite_in_a_reason():
  """Even with steps that take no time at all."""
  machine = Machine(
    Policy(), compute_s=0.0, update_s=0.0, backward_s=0.0, contention_s=0.0
  )
  machine.steps(20)
  assert all(
    word not in reason
    for reason in machine.reasons
    for word in ("nan", "inf", "-")
  )
  assert math.isfinite(machine.clock_s)


def test_the_first_gradients_are_those_of_the_last_micro_batch():
  """No update can begin with those before, which the host adds up."""
  plan = {"accumulate": "host", "speculation": "record3"}
  with trainer(plan, accumulation=3) as ours:
    ours.step(batches(1, rows=12)[0])
    ours.drain()
    (times,) = ours._executor.times(0.0)
    ends_s = {span.name: span.end_s for span in ours.timeline().spans}
    outs = {k: x for k, x in ends_s.items() if k.startswith("grad_out")}
    assert times.first_grad_s in {
      x for k, x in outs.items() if k.endswith("micro=2")
    }
    assert times.first_grad_s > min(outs.values())
