"""Whether updates run ahead of validation, from measured times and clip rate.

Running ahead costs the record of every update, and another update where it is
taken back; it pays by overlap with backward. Where the host's cores are the
device's too, or bandwidth is short, there may be nothing to gain.
"""

import collections
import dataclasses
import statistics
from collections.abc import Callable, Sequence

from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan
from sojax.runtime.run import StepTimes
from sojax.runtime.speculation import NormSource, NormWatch, Speculation

# What an update takes with a record, and again after it was taken back, against
# a plain one: what the kernels take, for as long as nothing was measured here.
_RECORD_RATIO = 1.2
_REDO_RATIO = 1.3

_NUM_SAMPLES = 8
_MIN_SAMPLES = 3
# Of the mean that forgets: what the newest step counts.
_NEWEST = 0.1
# Steps to wait after running ahead was measured to lose; twice as many each
# time.
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 1024


@dataclasses.dataclass(frozen=True)
class Choice:
  """Whether the updates of a step run ahead, and why."""

  ahead: bool
  reason: str


class Policy:
  """Chooses between running ahead and waiting, by the time of a step.

  A step's time is that from its Validate to the next one's. Of waiting it is
  measured first. Then that of running ahead is predicted: with the host's
  updates S, and the time B for which backward still runs when they could begin,

      waiting - S + max(1.2 S - B, 0),   and 1.3 S more where it is taken back

  If that is less, updates run ahead and their time is measured, too. The
  fraction of steps that are taken back is a mean that forgets.
  """

  def __init__(self) -> None:
    self._waiting = _Samples()
    self._committed = _Samples()
    self._taken_back = _Samples()
    self._update_s = _Samples()
    self._backward_s = _Samples()
    self._rate = 0.0
    self._pause = _FIRST_PAUSE
    self._paused = 0

  def observe(self, before: StepTimes, after: StepTimes) -> None:
    """Takes the times of two steps, one after the other.

    Args:
      before: the step whose time it is.
      after: the one that follows it.
    """
    self._rate += _NEWEST * (before.clipped - self._rate)
    if before.number == 0 or before.ahead != after.ahead:
      return  # it compiled; or the end of one kind ran into the other
    idle_s = max(after.begun_s - before.ended_s, 0.0)
    step_s = after.validated_s - before.validated_s - idle_s
    if not before.ahead:
      self._waiting.append(step_s)
      self._update_s.append(before.update_s)
      self._backward_s.append(before.validated_s - before.first_grad_s)
    elif before.clipped:
      self._taken_back.append(step_s)
    else:
      self._committed.append(step_s)

  def choose(self) -> Choice:
    """Returns what the next step does."""
    if not self._waiting.known:
      return Choice(False, "waits: to measure it")
    waiting_s = self._waiting.median
    ahead_s, how = self._ahead_s(waiting_s)
    figures = (
      f"{how} {ahead_s:.3g} s a step ahead, {waiting_s:.3g} s waiting,"
      f" {self._rate:.0%} taken back"
    )
    if self._paused:
      self._paused -= 1
      if not self._paused:
        self._committed.clear()
        self._taken_back.clear()
      return Choice(False, f"waits: {figures}")
    if ahead_s < waiting_s:
      return Choice(True, figures)
    if self._committed.known:
      self._paused = self._pause
      self._pause = min(2 * self._pause, _LONGEST_PAUSE)
    return Choice(False, f"waits: {figures}")

  def _ahead_s(self, waiting_s: float) -> tuple[float, str]:
    """Returns the time to expect of a step whose updates run ahead."""
    update_s, backward_s = self._update_s.median, self._backward_s.median
    exposed_s = max(_RECORD_RATIO * update_s - backward_s, 0.0)
    committed_s = waiting_s - update_s + exposed_s
    how = "predicted"
    if self._committed.known:
      committed_s, how = self._committed.median, "measured"
    taken_back_s = committed_s + _REDO_RATIO * update_s
    if self._taken_back.known:
      taken_back_s = self._taken_back.median
    return committed_s + self._rate * (taken_back_s - committed_s), how


class _Samples:
  """The newest values of a quantity."""

  def __init__(self) -> None:
    self._values: collections.deque[float] = collections.deque(
      maxlen=_NUM_SAMPLES
    )
    self.append = self._values.append
    self.clear = self._values.clear

  @property
  def known(self) -> bool:
    return len(self._values) >= _MIN_SAMPLES

  @property
  def median(self) -> float:
    return statistics.median(self._values)


class Speculator:
  """Begins the speculation of each step as the plan says."""

  def __init__(self, plan: Plan, config: TrainConfig, *, num_stages: int):
    self._clip_norm = config.clip_norm
    self._source = NormSource.STAGES
    if plan.accumulate == "host":
      self._source = NormSource.HOST_SUMS
    elif plan.transport(num_stages) != "dma":
      self._source = NormSource.UPDATES
    self._fixed: Choice | None = None
    if plan.speculation == "wait" or plan.speculate == "never":
      self._fixed = Choice(False, "waits: the plan says so")
    elif plan.speculate == "always":
      self._fixed = Choice(True, "the plan says so")
    self._policy = Policy()
    self._newest: StepTimes | None = None

  def begin(self, ended: Callable[[float], Sequence[StepTimes]]) -> Speculation:
    """Returns the speculation of the next step.

    Args:
      ended: returns the steps that were begun after a time and have ended, in
        their order.
    """
    choice = self._fixed
    if choice is None:
      self._observe(ended)
      choice = self._policy.choose()
    watch = NormWatch(self._clip_norm, self._source)
    return Speculation(choice.reason, choice.ahead, watch)

  def _observe(self, ended: Callable[[float], Sequence[StepTimes]]) -> None:
    newest = self._newest
    for times in ended(0.0 if newest is None else newest.begun_s):
      if newest is not None and times.number == newest.number + 1:
        self._policy.observe(newest, times)
      newest = times
    self._newest = newest
