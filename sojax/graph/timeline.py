"""What ran when: the spans of each lane, and the figures drawn from them.

A timeline is recorded by an executor or computed by a simulator; both are read
the same way, so that they can be laid side by side.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sojax.graph.graph import Lane

LANES = tuple(str(lane) for lane in Lane)
"""The serial resources of a step, in the order in which they are shown."""

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
  """Records one task on one lane.

  Attributes:
    name: what ran, such as "backward block_3".
    lane: one of `LANES`.
    step: the training step that the task belongs to.
    start_s: start in seconds, on one clock for all spans of a timeline
      (time.perf_counter()'s when measured, a virtual one when simulated).
    end_s: end in seconds on the same clock, not before `start_s`.
    bytes: bytes moved, 0 for a task that moves none.
    task: the task's index in its step graph, or None.
    note: what else is to be said of it, or "".

  Raises:
    ValueError: if the lane is unknown, a time is not finite, the span ends
      before it starts, or `bytes` is negative.
  """

  name: str
  lane: str
  step: int
  start_s: float
  end_s: float
  bytes: int = 0
  task: int | None = None
  note: str = ""

  def __post_init__(self) -> None:
    _check_lane(self.lane)
    if not -math.inf < self.start_s <= self.end_s < math.inf:
      raise ValueError(
        f"span {self.name!r}: start_s={self.start_s}, end_s={self.end_s} must"
        " be finite and in this order; stamp both on the same clock"
      )
    if self.bytes < 0:
      raise ValueError(
        f"span {self.name!r}: bytes={self.bytes} is below 0; give the number"
        " of bytes moved, or 0"
      )


def mfu(model_flops: float, step_s: float, peak_flops: float) -> float:
  """Returns the model FLOPs utilization: the share of the peak that is useful.

  Args:
    model_flops: operations of the model in a step, without recomputation.
    step_s: seconds of a step.
    peak_flops: the device's FLOP/s at most; of all devices if `model_flops` is.

  >>> mfu(2e12, 4.0, 1e12)
  0.5
  """
  return model_flops / (step_s * peak_flops)


class Timeline:
  """Holds spans and says how busy each lane was.

  Times are measured within a window: if none is given that from the first start
  to the last end of all spans, over all lanes. An empty timeline has an empty
  window. Spans that overlap in one lane count once.

  Attributes:
    spans: the spans, sorted by start, then by end.
    window: start and end of the window, in seconds on the spans' clock.
  """

  def __init__(
    self, spans: Iterable[Span], window: Interval | None = None
  ) -> None:
    """Sorts the spans.

    Args:
      spans: spans of any lanes and steps, in any order, all on one clock.
      window: the window, which holds all spans; None for that of the spans.
    """
    self.spans = tuple(sorted(spans, key=lambda s: (s.start_s, s.end_s)))
    if window is None:
      first_s = self.spans[0].start_s if self.spans else 0.0
      window = first_s, max((s.end_s for s in self.spans), default=first_s)
    self.window = window

  def steps(self, first: int, last: int) -> "Timeline":
    """Returns the timeline of steps `first` to `last`, both included."""
    return Timeline(s for s in self.spans if first <= s.step <= last)

  def step_end_s(self, step: int) -> float:
    """Returns when the last span of a step ended.

    Raises:
      ValueError: if the timeline has no span of the step.
    """
    ends_s = [s.end_s for s in self.spans if s.step == step]
    if not ends_s:
      raise ValueError(
        f"the timeline has no span of step {step}; its steps are"
        f" {sorted({s.step for s in self.spans})}"
      )
    return max(ends_s)

  def cycle(self, first: int, last: int) -> "Timeline":
    """Returns what runs from the end of step `first` - 1 to that of `last`.

    Steps overlap: the spans of others that run then are in it, too. What
    reaches out of this window is cut off; a span's bytes belong to the part in
    which it ends. If the steps are steady it is, as long as they take, what a
    lane is busy with and what is idle.

    Raises:
      ValueError: if the timeline lacks one of these steps.
    """
    window = start_s, end_s = self.step_end_s(first - 1), self.step_end_s(last)
    return Timeline(
      (
        _cut(span, window)
        for span in self.spans
        if span.start_s < end_s and span.end_s > start_s
      ),
      window,
    )

  def window_s(self) -> float:
    """Returns the seconds of the window."""
    return self.window[1] - self.window[0]

  def busy_s(self, lane: str) -> float:
    """Returns the seconds during which at least one span of `lane` runs.

    Raises:
      ValueError: if `lane` is not one of `LANES`.
    """
    return _total_s(self._busy(lane))

  def idle_s(self, lane: str) -> float:
    """Returns the seconds of the window during which no span of `lane` runs.

    Raises:
      ValueError: if `lane` is not one of `LANES`.
    """
    return self.window_s() - self.busy_s(lane)

  def exposed_host_s(self) -> float:
    """Returns the seconds during which the host works and the device waits.

    This is the host work that nothing hides: with perfect overlap it is 0. A
    device whose collectives run does not wait for the host.
    """
    return self.busy_s("host") - self._hidden_host_s()

  def overlap_fraction(self) -> float:
    """Returns the share of the host's busy time that device work hides.

    Between 0 and 1; 1 if the host does nothing, since nothing is exposed then.
    """
    host_s = self.busy_s("host")
    return self._hidden_host_s() / host_s if host_s else 1.0

  def table(self) -> str:
    """Returns a table for people: a row per lane that has spans.

    Columns: lane, busy and idle seconds, busy share of the window. The last
    line gives the exposed host time.
    """
    window_s = self.window_s()
    lines = [f"{'lane':<8} {'busy_s':>10} {'idle_s':>10} {'busy %':>7}"]
    for lane in self._lanes():
      busy_s = self.busy_s(lane)
      share = 100 * busy_s / window_s if window_s else 0.0
      lines.append(
        f"{lane:<8} {busy_s:>10.4f} {self.idle_s(lane):>10.4f} {share:>7.1f}"
      )
    lines.append(f"exposed host time: {self.exposed_host_s():.4f} s")
    return "\n".join(lines)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a trace that ui.perfetto.dev and chrome://tracing open.

    One track per lane that has spans; times in microseconds from the first
    start; step and bytes among each event's arguments.

    Args:
      path: the JSON file to write, replaced if it exists.
    """
    lanes = self._lanes()
    events = _track_events(lanes) + [
      self._event(span, lanes.index(span.lane)) for span in self.spans
    ]
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(trace), encoding="utf-8")

  def _event(self, span: Span, track: int) -> dict[str, Any]:
    return {
      "ph": "X",
      "name": span.name,
      "cat": span.lane,
      "pid": 0,
      "tid": track,
      "ts": 1e6 * (span.start_s - self.spans[0].start_s),
      "dur": 1e6 * (span.end_s - span.start_s),
      "args": {"step": span.step, "bytes": span.bytes}
      | ({"note": span.note} if span.note else {}),
    }

  def _lanes(self) -> list[str]:
    used = {span.lane for span in self.spans}
    return [lane for lane in LANES if lane in used]

  def _busy(self, *lanes: str) -> list[Interval]:
    for lane in lanes:
      _check_lane(lane)
    return _merge((s.start_s, s.end_s) for s in self.spans if s.lane in lanes)

  def _hidden_host_s(self) -> float:
    return _total_s(
      _intersect(self._busy("host"), self._busy("device", "network"))
    )


def _cut(span: Span, window: Interval) -> Span:
  return dataclasses.replace(
    span,
    start_s=max(span.start_s, window[0]),
    end_s=min(span.end_s, window[1]),
    bytes=span.bytes if span.end_s <= window[1] else 0,
  )


def _check_lane(lane: str) -> None:
  if lane not in LANES:
    raise ValueError(f"lane={lane!r} is unknown; use one of {', '.join(LANES)}")


def _track_events(lanes: Sequence[str]) -> list[dict[str, Any]]:
  """Returns the metadata events that name and order the tracks."""
  events = [_metadata("process_name", 0, {"name": "sojax"})]
  for track, lane in enumerate(lanes):
    events.append(_metadata("thread_name", track, {"name": lane}))
    events.append(_metadata("thread_sort_index", track, {"sort_index": track}))
  return events


def _metadata(name: str, track: int, args: dict[str, Any]) -> dict[str, Any]:
  return {"ph": "M", "name": name, "pid": 0, "tid": track, "args": args}


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
  """Merges intervals, sorted by start, that overlap or touch."""
  merged: list[Interval] = []
  for start_s, end_s in intervals:
    if merged and start_s <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
    else:
      merged.append((start_s, end_s))
  return merged


def _intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
  """Intersects two lists of sorted intervals, each without overlaps. O(n)."""
  common: list[Interval] = []
  i = j = 0
  while i < len(a) and j < len(b):
    start_s, end_s = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
    if start_s < end_s:
      common.append((start_s, end_s))
    if a[i][1] < b[j][1]:
      i += 1
    else:
      j += 1
  return common


def _total_s(intervals: list[Interval]) -> float:
  return math.fsum(end_s - start_s for start_s, end_s in intervals)
