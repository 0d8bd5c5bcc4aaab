"""Pictures, looked at by size and by colour."""

import dataclasses

import matplotlib.image
import numpy as np
import pytest

from experiments import plots
from sojax.graph.timeline import Span, Timeline
from sojax.plan.hardware import Curve
from sojax.plan.machines import machine


def _timeline():
  return Timeline(
    [
      Span("forward stage=0", "device", 4, 10.0, 11.0),
      Span("backward stage=0", "device", 4, 11.0, 13.0),
      Span("grad_out bucket=0", "d2h", 4, 13.0, 13.5, 64),
      Span("host_update bucket=0", "host", 4, 13.0, 14.0),
      Span("forward stage=0", "device", 5, 14.0, 15.0),
    ]
  )


def _num_colours(picture: np.ndarray) -> int:
  """Counts the colours, not greys, of more than a few pixels."""
  pixels, counts = np.unique(
    picture[..., :3].reshape(-1, 3), axis=0, return_counts=True
  )
  is_colour = np.ptp(pixels, axis=1) > 0.3
  return int(np.sum(is_colour & (counts > 1000)))


def test_picture_has_a_row_per_lane_and_a_colour_per_kind(tmp_path):
  path = tmp_path / "timeline.png"
  plots.save_timeline(_timeline(), path)
  picture = matplotlib.image.imread(path)
  assert picture.shape[1] == 12 * 150
  # Three lanes: 1.2 + 3 * 0.6 inches at 150 dots.
  assert picture.shape[0] == 450
  rows = np.array_split(picture[100:350, 150:], 3)
  assert [_num_colours(row) for row in rows] == [2, 1, 1]
  assert _num_colours(picture[100:350]) == 4


def test_a_prediction_stands_above_what_was_measured(tmp_path):
  # The prediction begins at another time and takes half as long.
  predicted = Timeline(
    [
      Span("forward stage=0", "device", 0, 0.0, 1.0),
      Span("host_update bucket=0", "host", 0, 1.0, 2.5),
    ]
  )
  path = tmp_path / "both.png"
  plots.save_comparison(predicted, _timeline(), path)
  picture = matplotlib.image.imread(path)
  # Twice the height of three lanes: both have a row for each.
  assert picture.shape[:2] == (900, 12 * 150)
  above, below = picture[:450], picture[450:]
  assert (_num_colours(above[100:]), _num_colours(below[:-80])) == (2, 4)
  # The axis is that of the longer one: on the right half there is nothing.
  assert _num_colours(above[100:, 1000:]) == 0
  assert _num_colours(below[:-80, 1000:]) > 0


def test_empty_timeline_is_refused(tmp_path):
  with pytest.raises(ValueError, match="0 spans"):
    plots.save_timeline(Timeline([]), tmp_path / "timeline.png")
  with pytest.raises(ValueError, match="0 spans"):
    plots.save_comparison(_timeline(), Timeline([]), tmp_path / "both.png")


def test_a_picture_of_bandwidth_has_a_line_and_a_dot_for_each_link(tmp_path):
  names = ("d2h", "h2d", "d2h_pageable", "h2d_pageable")
  curves = {
    name: Curve(((1e6, number * 1e10), (1e9, number * 5e10)))
    for number, name in enumerate(names, 1)
  }
  path = tmp_path / "bandwidth.png"
  profile = dataclasses.replace(machine("gh200"), **curves)
  plots.save_bandwidth(profile, path)
  picture = matplotlib.image.imread(path)
  assert picture.shape == (750, 1200, 4)
  pixels = picture[..., :3].reshape(-1, 3)
  colours, counts = np.unique(pixels, axis=0, return_counts=True)
  of_lines = (np.ptp(colours, axis=1) > 0.3) & (counts > 500)
  assert int(of_lines.sum()) == 4
  # Steep to the last point, the knee: the right end has all four dots.
  right = picture[:, 1100:, :3].reshape(-1, 3)
  colours, counts = np.unique(right, axis=0, return_counts=True)
  of_dots = (np.ptp(colours, axis=1) > 0.3) & (counts > 100)
  assert int(of_dots.sum()) == 4


def test_a_picture_of_bars_has_one_for_each_height_and_no_more(tmp_path):
  path = tmp_path / "bars.png"
  groups = {"one": {"a": 1.0, "b": 3.0}, "two": {"b": 2.0}}
  plots.save_bars(groups, path, label="height")
  picture = matplotlib.image.imread(path)[..., :3]
  pixels = picture.reshape(-1, 3)
  colours, counts = np.unique(pixels, axis=0, return_counts=True)
  coloured = (np.ptp(colours, axis=1) > 0.3) & (counts > 2000)
  # b's bars are five times as high as a's only one.
  small, large = sorted(counts[coloured])
  assert large / small == pytest.approx(5, rel=0.05)


def test_a_picture_of_an_ablation_has_two_bars_a_row_if_it_was_measured(
  tmp_path,
):
  row = {"name": "all", "predicted_s": 2.0, "lower_bound_s": 1.5}
  path = tmp_path / "ablation.png"
  for num_colours, more in ((1, {}), (2, {"measured_s": 2.1})):
    plots.save_ablation([row | more, row | more | {"name": "none"}], path)
    assert _num_colours(matplotlib.image.imread(path)[100:]) == num_colours
  with pytest.raises(ValueError, match="0 rows"):
    plots.save_ablation([], path)
