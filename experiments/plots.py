"""Pictures of results; the only module that draws."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib import axes as axes_lib
from matplotlib import figure, patches
from matplotlib.typing import ColorType

from sojax.graph.timeline import LANES, Timeline
from sojax.plan.hardware import HardwareProfile

_MIN_WIDTH_FRACTION = 1 / 2000  # of the axis: about one pixel of the picture
_LINKS = {
  "d2h": "to the host, pinned",
  "h2d": "to the device, pinned",
  "d2h_pageable": "to the host, not pinned",
  "h2d_pageable": "to the device, not pinned",
}


def save_timeline(timeline: Timeline, path: str | os.PathLike[str]) -> None:
  """Draws a timeline: one row per lane, coloured by the kind of task.

  The kind is the first word of a span's name. Dashed lines mark where each
  step's first task starts.

  Args:
    timeline: spans of one or a few steps.
    path: picture file to write, its format by its suffix.

  Raises:
    ValueError: if the timeline is empty.
  """
  _save({"": timeline}, path)


def save_comparison(
  predicted: Timeline, measured: Timeline, path: str | os.PathLike[str]
) -> None:
  """Draws a predicted timeline above a measured one.

  Both have the same rows, the same colours and the same axis of time, on which
  each begins at 0.

  Args:
    predicted: spans of one or a few steps.
    measured: spans of as many steps.
    path: picture file to write, its format by its suffix.

  Raises:
    ValueError: if one of them is empty.
  """
  _save({"predicted": predicted, "measured": measured}, path)


def save_bandwidth(
  profile: HardwareProfile, path: str | os.PathLike[str]
) -> None:
  """Draws bytes/s of transfers over their size; a dot is on each knee.

  The knee is the smallest size with 90 % of the best.

  Args:
    profile: the machine.
    path: picture file to write, its format by its suffix.
  """
  picture = figure.Figure(figsize=(8, 5), dpi=150, layout="constrained")
  axes = picture.add_subplot()
  for name, label in _LINKS.items():
    curve = getattr(profile, name)
    knee = curve.knee()
    sizes, rates = zip(*curve.points, strict=True)
    (line,) = axes.plot(
      [size / 2**20 for size in sizes],
      [rate / 1e9 for rate in rates],
      "-" if name in ("d2h", "h2d") else "--",
      label=f"{label}: knee at {knee / 2**20:.3g} MiB",
    )
    axes.plot(
      knee / 2**20, curve.at(knee) / 1e9, "o", color=line.get_color(), ms=8
    )
  axes.set_xscale("log", base=2)
  axes.xaxis.set_major_formatter("{x:g}")
  axes.set_xlabel("MiB of a transfer")
  axes.set_ylabel("GB/s")
  axes.set_ylim(bottom=0)
  axes.set_title(profile.name)
  axes.legend(frameon=False)
  picture.savefig(path)


def save_bars(
  groups: Mapping[str, Mapping[str, float]],
  path: str | os.PathLike[str],
  *,
  label: str,
) -> None:
  """Draws groups of bars, a colour for each name in them.

  Args:
    groups: heights by name, by group; a name that a group lacks has no bar.
    path: picture file to write, its format by its suffix.
    label: what the heights are.
  """
  names = [*dict.fromkeys(name for group in groups.values() for name in group)]
  picture = figure.Figure(figsize=(10, 4), dpi=110, layout="constrained")
  axes = picture.add_subplot()
  width = 0.8 / len(names)
  for number, name in enumerate(names):
    shown = [
      (place - 0.4 + (number + 0.5) * width, group[name])
      for place, group in enumerate(groups.values())
      if name in group
    ]
    places, heights = zip(*shown, strict=True)
    axes.bar(places, heights, width, label=name)
  axes.set_xticks(range(len(groups)), [*groups])
  axes.set_ylabel(label)
  picture.legend(loc="outside upper center", ncols=len(names), frameon=False)
  picture.savefig(path)


def _save(
  timelines: Mapping[str, Timeline], path: str | os.PathLike[str]
) -> None:
  """Draws timelines below each other, by title."""
  if not all(timeline.spans for timeline in timelines.values()):
    raise ValueError("a timeline of 0 spans has no picture; run a step first")
  spans = [span for timeline in timelines.values() for span in timeline.spans]
  used = {span.lane for span in spans}
  lanes = [lane for lane in LANES if lane in used]
  kinds = sorted({_kind(span.name) for span in spans})
  palette = matplotlib.color_sequences["tab20" if len(kinds) > 10 else "tab10"]
  colours = {kind: palette[i] for i, kind in enumerate(kinds)}
  longest_s = max(timeline.window_s() for timeline in timelines.values())
  height = (1.2 + 0.6 * len(lanes)) * len(timelines)
  picture = figure.Figure(figsize=(12, height), dpi=150, layout="constrained")
  all_axes = picture.subplots(len(timelines), sharex=True, squeeze=False)
  for axes, (title, timeline) in zip(
    all_axes[:, 0], timelines.items(), strict=True
  ):
    _draw_spans(axes, timeline, lanes, colours, longest_s)
    _draw_steps(axes, timeline)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, longest_s)
    axes.set_ylabel(title)
  all_axes[-1, 0].set_xlabel("seconds")
  picture.legend(
    handles=[patches.Patch(color=c, label=kind) for kind, c in colours.items()],
    loc="outside upper center",
    ncols=min(len(kinds), 8),
    frameon=False,
  )
  picture.savefig(path)


def save_ablation(
  rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]
) -> None:
  """Draws the times of an ablation: a bar for each row, its bound as a mark.

  Args:
    rows: "name", "predicted_s", "lower_bound_s", and perhaps "measured_s".
    path: picture file to write, its format by its suffix.

  Raises:
    ValueError: if there are no rows.
  """
  if not rows:
    raise ValueError("an ablation of 0 rows has no picture; choose a row")
  picture = figure.Figure(
    figsize=(9, 1.2 + 0.3 * len(rows)), dpi=150, layout="constrained"
  )
  axes = picture.add_subplot()
  places = range(len(rows))
  measured = "measured_s" in rows[0]
  kinds = ("predicted_s", "measured_s") if measured else ("predicted_s",)
  height = 0.8 / len(kinds)
  for number, kind in enumerate(kinds):
    axes.barh(
      [place + (number - (len(kinds) - 1) / 2) * height for place in places],
      [row[kind] for row in rows],
      height=height,
      label=kind.removesuffix("_s"),
    )
  bounds = [row["lower_bound_s"] for row in rows]
  axes.plot(bounds, places, "k|", markersize=12, label="lower bound")
  axes.set_yticks(places, [row["name"] for row in rows])
  axes.set_ylim(len(rows) - 0.5, -0.5)
  axes.set_xlabel("seconds of a step")
  picture.legend(loc="outside upper center", ncols=3, frameon=False)
  picture.savefig(path)


def _draw_spans(
  axes: axes_lib.Axes,
  timeline: Timeline,
  lanes: list[str],
  colours: Mapping[str, ColorType],
  axis_s: float,
) -> None:
  origin_s = timeline.window[0]
  min_width_s = axis_s * _MIN_WIDTH_FRACTION
  for span in timeline.spans:
    width_s = max(span.end_s - span.start_s, min_width_s)
    axes.barh(
      lanes.index(span.lane),
      width_s,
      left=span.start_s - origin_s,
      color=colours[_kind(span.name)],
      edgecolor="white",
      # An edge would cover a span that is hardly wider.
      linewidth=0.3 if width_s > 4 * min_width_s else 0.0,
    )


def _draw_steps(axes: axes_lib.Axes, timeline: Timeline) -> None:
  origin_s = timeline.window[0]
  starts_s: dict[int, float] = {}
  for span in timeline.spans:
    starts_s.setdefault(span.step, span.start_s)
  for step, start_s in starts_s.items():
    axes.axvline(start_s - origin_s, color="grey", linestyle="--", lw=0.8)
    axes.annotate(
      f"step {step}",
      (start_s - origin_s, 1.03),
      xycoords=("data", "axes fraction"),
      fontsize="small",
      color="grey",
    )


def _kind(name: str) -> str:
  return name.split()[0]
