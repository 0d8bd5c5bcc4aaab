"""Pictures of results; the only module that draws."""

import os
from collections.abc import Mapping

import matplotlib
from matplotlib import axes as axes_lib
from matplotlib import figure, patches
from matplotlib.typing import ColorType

from sojax.graph.timeline import LANES, Timeline

_MIN_WIDTH_FRACTION = 1 / 2000  # of the axis: about one pixel of the picture


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
  if not timeline.spans:
    raise ValueError("a timeline of 0 spans has no picture; run a step first")
  used = {span.lane for span in timeline.spans}
  lanes = [lane for lane in LANES if lane in used]
  kinds = sorted({_kind(span.name) for span in timeline.spans})
  palette = matplotlib.color_sequences["tab10"]
  colours = {kind: palette[i % 10] for i, kind in enumerate(kinds)}
  picture = figure.Figure(
    figsize=(12, 1.2 + 0.6 * len(lanes)), dpi=150, layout="constrained"
  )
  axes = picture.add_subplot()
  _draw_spans(axes, timeline, lanes, colours)
  _draw_steps(axes, timeline)
  axes.set_yticks(range(len(lanes)), lanes)
  axes.set_ylim(len(lanes) - 0.5, -0.5)
  axes.set_xlim(0, timeline.window_s())
  axes.set_xlabel("seconds")
  picture.legend(
    handles=[patches.Patch(color=c, label=kind) for kind, c in colours.items()],
    loc="outside upper center",
    ncols=len(kinds),
    frameon=False,
  )
  picture.savefig(path)


def _draw_spans(
  axes: axes_lib.Axes,
  timeline: Timeline,
  lanes: list[str],
  colours: Mapping[str, ColorType],
) -> None:
  origin_s = timeline.spans[0].start_s
  min_width_s = timeline.window_s() * _MIN_WIDTH_FRACTION
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
  origin_s = timeline.spans[0].start_s
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
