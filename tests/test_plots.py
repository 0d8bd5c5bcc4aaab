"""Timeline pictures, looked at by size and by colour."""

import matplotlib.image
import numpy as np
import pytest

from experiments import plots
from sojax.graph.timeline import Span, Timeline


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


def test_empty_timeline_is_refused(tmp_path):
  with pytest.raises(ValueError, match="0 spans"):
    plots.save_timeline(Timeline([]), tmp_path / "timeline.png")
