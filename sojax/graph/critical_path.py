"""The critical path of a timeline: what each start waited for, walked back.

A task starts at the latest of three: what it depends on has ended, its lane has
ended the task before, its thread has issued it. The path goes back through that
one, from the last end. Where the thread was late, it goes on with the end for
which the thread had waited last, and the time since then is dispatch. So the
path has no holes, and its seconds add up to the time that it covers.
"""

import bisect
import dataclasses
import math
from collections.abc import Iterator

from sojax.graph.graph import Lane, StepGraph, Task, waits_for_end
from sojax.graph.timeline import Interval, Span, Timeline

LIMITS = ("device", "host", "link", "network", "dispatch")
"""What a step can be limited by."""

_LIMIT_OF = {"d2h": "link", "h2d": "link"}

_Key = tuple[int, int]  # step and task


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
  """A part of the path.

  Attributes:
    name: of the task that ran, or of the one that was issued.
    step: its step.
    where: the lane that ran it; or "dispatch".
    start_s: where the part begins, on the timeline's clock.
    end_s: where it ends.
    after: what its start waited for: "dependency", "lane", "issue", or "" if
      nothing is known.
  """

  name: str
  step: int
  where: str
  start_s: float
  end_s: float
  after: str = ""

  @property
  def seconds(self) -> float:
    """How long the part is."""
    return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True)
class CriticalPath:
  """The parts of the path within a window, in the order of time.

  Attributes:
    segments: the parts.
    window: start and end of the time that was looked at.
  """

  segments: tuple[Segment, ...]
  window: Interval

  def seconds(self) -> dict[str, float]:
    """Returns the seconds of the path by what limits it, see `LIMITS`."""
    by_limit: dict[str, float] = dict.fromkeys(LIMITS, 0.0)
    for segment in self.segments:
      by_limit[_LIMIT_OF.get(segment.where, segment.where)] += segment.seconds
    return by_limit

  @property
  def limit(self) -> str:
    """What most of the path's time is spent on: one of `LIMITS`."""
    seconds = self.seconds()
    return max(LIMITS, key=lambda limit: seconds[limit])

  def table(self) -> str:
    """Returns a table for people: the path's time by what it is spent on.

    First by limit, then by lane and kind of task. The last line names the
    limit.
    """
    by_kind: dict[tuple[str, str], float] = {}
    for segment in self.segments:
      key = segment.where, segment.name.split()[0]
      by_kind[key] = by_kind.get(key, 0.0) + segment.seconds
    window_s = self.window[1] - self.window[0]
    rows = [(limit, "", s) for limit, s in self.seconds().items() if s]
    rows += [(where, kind, s) for (where, kind), s in sorted(by_kind.items())]
    lines = [f"{'on':<9} {'kind':<16} {'path_s':>10} {'path %':>7}"]
    for where, kind, seconds in rows:
      share = 100 * seconds / window_s if window_s else 0.0
      lines.append(f"{where:<9} {kind:<16} {seconds:>10.4f} {share:>7.1f}")
    lines.append(f"limit: {self.limit}")
    return "\n".join(lines)


def critical_path(
  graph: StepGraph, timeline: Timeline, first: int, last: int
) -> CriticalPath:
  """Returns the path through steps `first` to `last`, see `Timeline.cycle`.

  It is walked back from the last end of the whole timeline. What ends a step
  need not hold up the next one: the path is that of the steady state only if a
  step or two follow `last`.

  Args:
    graph: the step graph.
    timeline: simulated or measured; its spans name their tasks.
    first: first step to look at; the one before must be in the timeline.
    last: last step to look at.

  Raises:
    ValueError: if the timeline lacks one of these steps, or a span of it names
      no task of the graph.
  """
  window = timeline.step_end_s(first - 1), timeline.step_end_s(last)
  walk = _Walk(graph, timeline)
  segments = [
    dataclasses.replace(
      segment,
      start_s=max(segment.start_s, window[0]),
      end_s=min(segment.end_s, window[1]),
    )
    for segment in walk.back(until_s=window[0])
    if segment.end_s > window[0] and segment.start_s < window[1]
  ]
  return CriticalPath(tuple(reversed(segments)), window)


class _Walk:
  """Finds what each task waited for."""

  def __init__(self, graph: StepGraph, timeline: Timeline):
    self._graph = graph
    self._spans: dict[_Key, Span] = {}
    for span in timeline.spans:
      if span.task is None or not 0 <= span.task < len(graph.tasks):
        raise ValueError(
          f"span {span.name!r} names task={span.task}, not one of the graph's"
          f" {len(graph.tasks)}; take the timeline and the graph of one plan"
        )
      self._spans[span.step, span.task] = span
    self._before_on_lane = self._lane_orders()
    self._awaited = self._awaited_by_threads()

  def back(self, until_s: float) -> Iterator[Segment]:
    """Walks from the last end to a time; yields the newest part first."""
    key: _Key | None = max(self._spans, key=lambda k: (self._spans[k].end_s, k))
    end_s = self._spans[key].end_s
    seen = set()
    while key is not None and end_s > until_s:
      seen.add(key)
      span = self._spans[key]
      after, before = self._waited_for(key, seen)
      end_s = span.start_s if before is None else self._spans[before].end_s
      late = end_s < span.start_s
      part = Segment(span.name, span.step, span.lane, span.start_s, span.end_s)
      yield dataclasses.replace(part, after="issue" if late else after)
      if late:
        yield dataclasses.replace(
          part, where="dispatch", start_s=end_s, end_s=span.start_s, after=after
        )
      key = before

  def _waited_for(self, key: _Key, seen: set[_Key]) -> tuple[str, _Key | None]:
    """Returns what ended last of what a task's start waited for."""
    start_s = self._spans[key].start_s
    best: tuple[str, _Key | None] = ("", None)
    best_s = -math.inf
    for after, before in self._candidates(key):
      end_s = self._spans[before].end_s
      if best_s < end_s <= start_s and before not in seen:
        best, best_s = (after, before), end_s
    return best

  def _candidates(self, key: _Key) -> Iterator[tuple[str, _Key]]:
    for dep in self._deps(key, self._graph.tasks[key[1]]):
      yield "dependency", dep
    if key in self._before_on_lane:
      yield "lane", self._before_on_lane[key]
    if key in self._awaited:
      yield "issue", self._awaited[key]

  def _deps(self, key: _Key, task: Task) -> Iterator[_Key]:
    """Yields what a task depends on, as far as the timeline has it."""
    step = key[0]
    for number, deps in ((step, task.deps), (step - 1, task.prev_deps)):
      for dep in deps:
        if (number, dep) in self._spans:
          yield number, dep

  def _lane_orders(self) -> dict[_Key, _Key]:
    """Returns what each task's lane ended last before its start.

    Tasks of no seconds keep no lane busy.
    """
    before = {}
    for lane in Lane:
      of_lane = {k: s for k, s in self._spans.items() if s.lane == lane}
      busy = sorted(
        (span.end_s, key)
        for key, span in of_lane.items()
        if span.start_s < span.end_s
      )
      for key, span in of_lane.items():
        place = bisect.bisect_right(busy, span.start_s, key=lambda x: x[0])
        if place:
          before[key] = busy[place - 1][1]
    return before

  def _awaited_by_threads(self) -> dict[_Key, _Key]:
    """Returns the last end that its thread had waited for when it issued each.

    The host thread also waits for what it runs itself, and, before it begins a
    step, for the caller to have issued all of the step before.
    """
    steps = sorted({step for step, _ in self._spans})
    by_host = [self._graph.host_thread_issues(t) for t in self._graph.tasks]
    awaited: dict[_Key, _Key] = {}
    newest: dict[bool, _Key | None] = {False: None, True: None}
    for step in steps:
      newest[True] = self._later(newest[True], newest[False])
      for task in self._graph.tasks:
        key, side = (step, task.index), by_host[task.index]
        for dep in self._deps(key, task):
          if waits_for_end(task, self._graph.tasks[dep[1]]):
            newest[side] = self._later(newest[side], dep)
        found = newest[side]
        if found is not None and key in self._spans:
          awaited[key] = found
        if task.lane is Lane.HOST and key in self._spans:
          newest[side] = self._later(newest[side], key)
    return awaited

  def _later(self, one: _Key | None, other: _Key | None) -> _Key | None:
    known = [key for key in (one, other) if key is not None]
    return max(known, key=lambda k: self._spans[k].end_s, default=None)
