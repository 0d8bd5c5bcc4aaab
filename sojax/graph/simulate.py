"""Simulates steps of a step graph on a virtual clock, to a steady state.

The rules are those of the executor. Two threads issue tasks, each its own in
schedule order: the caller, which begins a step when it has issued all of the
one before, and the host thread, which follows it and itself runs the tasks of
the host. A task is issued when what it depends on has ended, or been issued if
that is enough; that takes the thread some time if the lane is asynchronous.
Every lane runs its tasks in the order in which they were issued. A task starts
when its lane is free and all that it depends on has ended. One of no seconds is
one where there is nothing to do, such as weights that need not be sent again:
it is not dispatched, needs no lane, and has ended when it has been issued and
all that it depends on has ended.

Not simulated: the bound of 32 programs that JAX dispatches ahead, what the
caller does between two steps, and programs that start before their turn.
"""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

from sojax.graph.graph import Lane, StepGraph, TaskKind
from sojax.graph.progress import Edges, StepProgress
from sojax.graph.sharing import Sharing
from sojax.graph.timeline import Span, Timeline
from sojax.plan.costs import Cost
from sojax.plan.hardware import Resource

MAX_PERIOD = 4
"""Steps after which a steady state may repeat, at most."""

_LANES = tuple(Lane)
_HOST = _LANES.index(Lane.HOST)

Times = tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Simulation:
  """What a simulation found.

  Attributes:
    graph: the step graph.
    starts_s: when each task of each step started; by step, then by task.
    ends_s: when each ended, likewise.
    late: which tasks of each step took their late costs.
    period: steps after which all times repeat; None if they did not, in all
      the steps that were simulated. Then the steady state is the mean of the
      second half.
    first: first step of the steady state that is reported.
    last: last one of it.
  """

  graph: StepGraph
  starts_s: tuple[Times, ...]
  ends_s: tuple[Times, ...]
  late: tuple[frozenset[int], ...]
  period: int | None
  first: int
  last: int

  @property
  def step_s(self) -> float:
    """Seconds of a step of the steady state."""
    window_s = max(self.ends_s[self.last]) - max(self.ends_s[self.first - 1])
    return window_s / (self.last - self.first + 1)

  @functools.cached_property
  def timeline(self) -> Timeline:
    """The spans of all steps that have ended."""
    return Timeline(
      Span(
        name=name,
        lane=str(task.lane),
        step=step,
        start_s=self.starts_s[step][task.index],
        end_s=self.ends_s[step][task.index],
        bytes=task.bytes,
        task=task.index,
      )
      for task, name in ((task, task.name) for task in self.graph.tasks)
      for step in range(len(self.ends_s))
    )

  def steady(self) -> Timeline:
    """Returns the steady state: the time of `first` to `last`, cut out.

    Its window is `step_s` for each of these steps. See `Timeline.cycle`.
    """
    return self.timeline.cycle(self.first, self.last)


def simulate(
  graph: StepGraph,
  costs: Sequence[Cost],
  *,
  late_costs: Mapping[int, Cost] | None = None,
  capacities: Mapping[Resource, float] | None = None,
  dispatch_s: float = 0.0,
  max_steps: int = 40,
) -> Simulation:
  """Simulates steps until they repeat. Deterministic.

  Args:
    graph: the step graph.
    costs: what each task takes, one for each.
    late_costs: what some tasks take instead, by their index, if their step's
      Validate has ended when they start; see `sojax.graph.late`.
    capacities: what tasks share, per second (`HardwareProfile.capacities`);
      tasks that want more together slow each other down, by `max_min_speeds`.
      What is not named has no bound; None: nothing is shared.
    dispatch_s: seconds that the issuing thread takes for a task of an
      asynchronous lane, if that takes time itself. Collectives take none:
      programs start them.
    max_steps: steps after which it ends in any case.

  Returns:
    The times of all tasks, and the steady state.

  Raises:
    ValueError: if there is not one cost for each task, or a figure is out of
      its range.

  >>> from sojax.graph.graph import Task, TaskKind
  >>> work = Task(index=0, kind=TaskKind.FORWARD, lane=Lane.DEVICE)
  >>> simulate(StepGraph((work,)), [Cost(2.0)]).step_s
  2.0
  """
  capacities = capacities or {}
  late_costs = late_costs or {}
  _check(graph, costs, capacities, dispatch_s, max_steps)
  for index, cost in late_costs.items():
    _check_cost(graph.tasks[index].name, cost)
  clock = _Clock(graph, costs, late_costs, capacities, dispatch_s, max_steps)
  return clock.run()


@dataclasses.dataclass(slots=True)
class _Issuer:
  """A thread that issues tasks, step after step.

  Attributes:
    tasks: what it issues in each step, in order.
    place: how many of its step's tasks it has issued.
    step: the step it is at.
    until_s: when it will have issued the task it is at; inf if it is at none.
  """

  tasks: list[int]
  place: int
  step: int = -1
  until_s: float = math.inf


class _Clock:
  """Goes from event to event: ends first, then issues, then starts."""

  def __init__(
    self,
    graph: StepGraph,
    costs: Sequence[Cost],
    late_costs: Mapping[int, Cost],
    capacities: Mapping[Resource, float],
    dispatch_s: float,
    max_steps: int,
  ):
    self._graph = graph
    self._max_steps = max_steps
    self._lanes = [_LANES.index(task.lane) for task in graph.tasks]
    self._takes_time = [cost.seconds > 0 for cost in costs]
    self._dispatch_s = [
      0.0 if task.lane is Lane.NETWORK or not takes_time else dispatch_s
      for task, takes_time in zip(graph.tasks, self._takes_time, strict=True)
    ]
    self._within = Edges(graph, [task.deps for task in graph.tasks])
    self._across = Edges(graph, [task.prev_deps for task in graph.tasks])
    waits = zip(self._within.waits, self._across.waits, strict=True)
    self._waits = [a + b for a, b in waits]
    by_host = [graph.host_thread_issues(task) for task in graph.tasks]
    of_side = [
      [task for task, host in enumerate(by_host) if host is side]
      for side in (False, True)
    ]
    self._caller, self._host = (_Issuer(x, len(x)) for x in of_side)
    # After the costs of all tasks come those of late ones.
    self._late = dict(zip(late_costs, itertools.count(len(costs))))
    self._validates = {
      t.index for t in graph.tasks if t.kind is TaskKind.VALIDATE
    }
    all_costs = [*costs, *late_costs.values()]
    self._sharing = Sharing(all_costs, capacities, len(_LANES))
    self._queues: list[list[tuple[float, int, int]]] = [[] for _ in _LANES]
    self._on_lane = [(-1, -1)] * len(_LANES)
    self._nothing_left: list[tuple[int, int]] = []
    self._steps = [StepProgress([*self._within.waits])]
    self._num_ended = 0
    self._now_s = 0.0

  def run(self) -> Simulation:
    num = 0
    while True:
      self._do_what_is_due()
      while num < self._num_ended:
        num += 1
        period = self._period(num)
        if period is not None or num == self._max_steps:
          return self._result(num, period)
      self._advance()

  def _period(self, num: int) -> int | None:
    """Returns after how many of the first `num` steps they repeat, twice."""
    for period in range(1, MAX_PERIOD + 1):
      if 2 * period >= num:
        return None
      newest, before, first = self._steps[num - 1 - 2 * period : num : period][
        ::-1
      ]
      if newest.repeats(before) and before.repeats(first):
        return period
    return None

  def _result(self, num: int, period: int | None) -> Simulation:
    steps = self._steps[:num]
    last = num - 2 if period is None else num - 1 - period
    return Simulation(
      graph=self._graph,
      starts_s=tuple(tuple(step.starts_s) for step in steps),
      ends_s=tuple(tuple(step.ends_s) for step in steps),
      late=tuple(frozenset(step.late) for step in steps),
      period=period,
      first=num // 2 if period is None else last - period + 1,
      last=last,
    )

  def _advance(self) -> None:
    """Goes to the next event, and ends what ends then."""
    self._now_s = min(
      self._sharing.next_end_s(self._now_s),
      self._caller.until_s,
      self._host.until_s,
    )
    assert self._now_s < math.inf, "every task waits for earlier ones only"
    for lane in self._sharing.take_ended(self._now_s):
      self._end(*self._on_lane[lane])

  def _do_what_is_due(self) -> None:
    self._issue_tasks()
    while self._nothing_left:
      ended, self._nothing_left = self._nothing_left, []
      for number, task in ended:
        self._steps[number].starts_s[task] = self._now_s
        self._end(number, task)
      self._issue_tasks()
    self._start_tasks()

  def _issue_tasks(self) -> None:
    self._go_on(self._caller)
    while self._go_on(self._host) and self._go_on(self._caller):
      pass

  def _go_on(self, issuer: _Issuer) -> bool:
    """Lets a thread go on until it has to wait; says whether it did anything.

    The host thread waits for what it runs itself.
    """
    did_anything = False
    while True:
      if issuer.until_s <= self._now_s:
        issuer.until_s = math.inf
        self._issued(issuer.step, issuer.tasks[issuer.place])
        issuer.place += 1
      elif issuer.until_s < math.inf:
        return did_anything
      elif issuer is self._host and not self._sharing.is_free(_HOST):
        return did_anything
      elif issuer.place == len(issuer.tasks):
        if not self._begin_step(issuer):
          return did_anything
      else:
        task = issuer.tasks[issuer.place]
        step = self._steps[issuer.step]
        if step.issue_waits[task]:
          return did_anything
        if self._lanes[task] == _HOST and self._takes_time[task]:
          step.issued_s[task] = self._now_s
          self._start(_HOST, issuer.step, task)
          issuer.place += 1
        else:
          issuer.until_s = self._now_s + self._dispatch_s[task]
      did_anything = True

  def _begin_step(self, issuer: _Issuer) -> bool:
    if issuer is self._host:
      if self._host.step == self._caller.step:
        return False
    elif self._caller.step + 1 == self._max_steps:
      return False
    else:
      self._steps.append(StepProgress([*self._waits]))
    issuer.step += 1
    issuer.place = 0
    return True

  def _issued(self, number: int, task: int) -> None:
    step, after = self._steps[number : number + 2]
    step.issued_s[task] = self._now_s
    if self._takes_time[task]:
      lane = self._lanes[task]
      heapq.heappush(self._queues[lane], (self._now_s, number, task))
    elif not step.start_waits[task]:
      self._nothing_left.append((number, task))
    step.is_issued[task] = True
    for waiting in self._within.on_issue[task]:
      step.issue_waits[waiting] -= 1
    for waiting in self._across.on_issue[task]:
      after.issue_waits[waiting] -= 1

  def _start_tasks(self) -> None:
    for lane, queue in enumerate(self._queues):
      if queue and self._sharing.is_free(lane):
        _, number, task = queue[0]
        if not self._steps[number].start_waits[task]:
          heapq.heappop(queue)
          self._start(lane, number, task)

  def _start(self, lane: int, number: int, task: int) -> None:
    step = self._steps[number]
    step.starts_s[task] = self._now_s
    self._on_lane[lane] = (number, task)
    cost = task
    if step.is_validated and task in self._late:
      cost = self._late[task]
      step.late.add(task)
    self._sharing.start(lane, cost, self._now_s)

  def _end(self, number: int, task: int) -> None:
    step = self._steps[number]
    step.ends_s[task] = self._now_s
    step.is_validated = step.is_validated or task in self._validates
    self._ended(number, self._within, task)
    self._ended(number + 1, self._across, task)
    step.num_left -= 1
    self._num_ended += not step.num_left

  def _ended(self, number: int, edges: Edges, task: int) -> None:
    """Tells those in a step who wait for the end of a task."""
    step = self._steps[number]
    for waiting in edges.on_end_issue[task]:
      step.issue_waits[waiting] -= 1
    for waiting in edges.on_end[task]:
      step.start_waits[waiting] -= 1
      if (
        not step.start_waits[waiting]
        and step.is_issued[waiting]
        and not self._takes_time[waiting]
      ):
        self._nothing_left.append((number, waiting))


def _check(
  graph: StepGraph,
  costs: Sequence[Cost],
  capacities: Mapping[Resource, float],
  dispatch_s: float,
  max_steps: int,
) -> None:
  if not graph.tasks or len(costs) != len(graph.tasks):
    raise ValueError(
      f"{len(costs)} costs for a graph of {len(graph.tasks)} tasks; give one"
      " for each of at least one task"
    )
  if not 0 <= dispatch_s < math.inf:
    raise ValueError(f"dispatch_s={dispatch_s} must be finite and at least 0")
  if max_steps < 4:
    raise ValueError(
      f"max_steps={max_steps} leaves no steady state; use 4 or more"
    )
  for resource, capacity in capacities.items():
    if not capacity > 0:
      raise ValueError(
        f"capacity {capacity} of {resource} must be above 0, or left out"
      )
  for task, cost in zip(graph.tasks, costs, strict=True):
    _check_cost(task.name, cost)


def _check_cost(name: str, cost: Cost) -> None:
  figures = (cost.seconds, *cost.uses.values())
  if not all(0 <= figure < math.inf for figure in figures):
    raise ValueError(
      f"the cost of {name} is {cost}; its figures must be finite and at least 0"
    )
  if cost.seconds == 0 and any(cost.uses.values()):
    raise ValueError(
      f"the cost of {name} is {cost}: what uses something takes seconds; raise"
      " them, or leave its uses out"
    )
