"""Timeline figures against hand-worked schedules and a sampling oracle."""

import json
import random

import pytest

from sojax.graph import timeline

# The hand-worked schedule, in seconds:
#
#          10   11   12   13   14   15   16   17   18   19   20
#   device [---- forward 0 ---]         [-- backward 0 -]
#   d2h                                      [--------]
#   host             [ update a (12-14) ]      [update b, c (16.5-20)    ]
#
# device busy 10-13 and 15-17; host busy 12-14 and 16.5-20.
_SPANS = (
  timeline.Span("forward 0", "device", 1, 10.0, 13.0),
  timeline.Span("backward 0", "device", 2, 15.0, 17.0),
  timeline.Span("grads 0", "d2h", 2, 16.0, 18.0, bytes=64),
  timeline.Span("update a", "host", 1, 12.0, 14.0),
  timeline.Span("update b", "host", 2, 16.5, 18.5),
  timeline.Span("update c", "host", 2, 18.0, 20.0),
)


def _hand_worked() -> timeline.Timeline:
  # In an order that is neither sorted nor grouped by lane.
  return timeline.Timeline(_SPANS[i] for i in (4, 1, 5, 0, 3, 2))


def test_busy_and_idle_match_the_hand_worked_schedule():
  recorded = _hand_worked()
  assert recorded.window_s() == 10.0
  assert [recorded.busy_s(lane) for lane in timeline.LANES] == [
    5.0,
    2.0,
    0.0,
    5.5,
    0.0,
  ]
  assert [recorded.idle_s(lane) for lane in timeline.LANES] == [
    5.0,
    8.0,
    10.0,
    4.5,
    10.0,
  ]


def test_exposed_host_time_is_host_work_while_the_device_is_idle():
  # Host 12-14 is hidden until 13; host 16.5-20 is hidden until 17.
  recorded = _hand_worked()
  assert recorded.exposed_host_s() == 1.0 + 3.0
  assert recorded.overlap_fraction() == 1.5 / 5.5


def test_touching_nested_and_repeated_spans_count_once():
  device = [(0.0, 4.0), (1.0, 2.0), (4.0, 5.0), (1.0, 2.0), (0.0, 0.5)]
  recorded = timeline.Timeline(
    timeline.Span("x", "device", 0, start_s, end_s) for start_s, end_s in device
  )
  assert recorded.busy_s("device") == 5.0
  assert recorded.idle_s("device") == 0.0


def test_random_schedules_agree_with_unit_sampling():
  # Oracle: spans on an integer grid, every unit of time looked at one by one.
  random_source = random.Random(0)
  for _ in range(200):
    spans = []
    for _ in range(random_source.randrange(1, 12)):
      start = random_source.randrange(20)
      end = start + random_source.randrange(6)
      lane = random_source.choice(("device", "host", "network"))
      spans.append(timeline.Span("x", lane, 0, start, end))
    window = range(min(s.start_s for s in spans), max(s.end_s for s in spans))
    busy = {
      lane: {
        t for s in spans if s.lane == lane for t in range(s.start_s, s.end_s)
      }
      for lane in ("device", "host", "network")
    }
    recorded = timeline.Timeline(spans)
    assert recorded.busy_s("device") == len(busy["device"])
    assert recorded.idle_s("host") == len(set(window) - busy["host"])
    exposed = busy["host"] - busy["device"] - busy["network"]
    assert recorded.exposed_host_s() == len(exposed)


def test_without_host_work_nothing_is_exposed():
  recorded = timeline.Timeline(_SPANS[:3])
  assert recorded.exposed_host_s() == 0.0
  assert recorded.overlap_fraction() == 1.0


def test_steps_selects_both_ends():
  recorded = _hand_worked()
  assert recorded.steps(1, 1).spans == (_SPANS[0], _SPANS[3])
  assert recorded.steps(2, 9).window_s() == 5.0
  assert recorded.steps(1, 2).spans == recorded.spans
  assert recorded.steps(3, 9).spans == ()


def test_spans_are_sorted_by_start():
  starts = [span.start_s for span in _hand_worked().spans]
  assert starts == [10.0, 12.0, 15.0, 16.0, 16.5, 18.0]


def test_saved_trace_has_sorted_events_on_named_tracks(tmp_path):
  path = tmp_path / "step.perfetto.json"
  _hand_worked().save(path)
  events = json.loads(path.read_text())["traceEvents"]
  tracks = {
    event["tid"]: event["args"]["name"]
    for event in events
    if event["ph"] == "M" and event["name"] == "thread_name"
  }
  assert sorted(tracks.values()) == ["d2h", "device", "host"]
  order = {
    event["tid"]: event["args"]["sort_index"]
    for event in events
    if event["ph"] == "M" and event["name"] == "thread_sort_index"
  }
  assert [tracks[t] for t in sorted(order, key=lambda t: order[t])] == [
    "device",
    "d2h",
    "host",
  ]
  assert {event["pid"] for event in events} == {0}
  # Microseconds from the first start, worked out from the schedule above.
  complete = [event for event in events if event["ph"] == "X"]
  assert len(complete) + 7 == len(events)
  assert [
    (e["name"], tracks[e["tid"]], e["ts"], e["dur"], e["args"])
    for e in complete
  ] == [
    ("forward 0", "device", 0.0, 3e6, {"step": 1, "bytes": 0}),
    ("update a", "host", 2e6, 2e6, {"step": 1, "bytes": 0}),
    ("backward 0", "device", 5e6, 2e6, {"step": 2, "bytes": 0}),
    ("grads 0", "d2h", 6e6, 2e6, {"step": 2, "bytes": 64}),
    ("update b", "host", 6.5e6, 2e6, {"step": 2, "bytes": 0}),
    ("update c", "host", 8e6, 2e6, {"step": 2, "bytes": 0}),
  ]


def test_table_shows_each_used_lane():
  assert _hand_worked().table().splitlines() == [
    "lane         busy_s     idle_s  busy %",
    "device       5.0000     5.0000    50.0",
    "d2h          2.0000     8.0000    20.0",
    "host         5.5000     4.5000    55.0",
    "exposed host time: 4.0000 s",
  ]


def test_empty_and_instant_timelines_have_an_empty_window(tmp_path):
  instant = timeline.Timeline([timeline.Span("x", "host", 0, 5.0, 5.0)])
  assert instant.table().splitlines()[1].split() == [
    "host",
    "0.0000",
    "0.0000",
    "0.0",
  ]
  empty = timeline.Timeline([])
  assert (empty.window_s(), empty.idle_s("host")) == (0.0, 0.0)
  assert empty.exposed_host_s() == 0.0
  empty.save(tmp_path / "empty.json")
  trace = json.loads((tmp_path / "empty.json").read_text())
  assert [e["ph"] for e in trace["traceEvents"]] == ["M"]


@pytest.mark.parametrize(
  ("span", "reason"),
  [
    ({"lane": "gpu"}, "lane='gpu' is unknown; use one of device, d2h"),
    ({"end_s": 0.5}, "start_s=1.0, end_s=0.5 must be finite and in this"),
    ({"start_s": float("nan")}, "start_s=nan, end_s=2.0 must be finite"),
    ({"end_s": float("inf")}, "start_s=1.0, end_s=inf must be finite"),
    ({"bytes": -1}, "bytes=-1 is below 0"),
  ],
)
def test_impossible_span_is_refused(span, reason):
  fields = {"lane": "host", "step": 0, "start_s": 1.0, "end_s": 2.0} | span
  with pytest.raises(ValueError, match=reason):
    timeline.Span("x", **fields)


def test_unknown_lane_is_refused():
  with pytest.raises(ValueError, match="lane='hots' is unknown"):
    _hand_worked().busy_s("hots")


def test_a_cycle_is_cut_out_between_the_ends_of_steps():
  # Step 1 ends at 5, step 2 at 9. "b" began before, "c" goes on after.
  recorded = timeline.Timeline(
    (
      timeline.Span("a", "device", 1, 0.0, 4.0, bytes=1),
      timeline.Span("z", "host", 1, 4.0, 5.0, bytes=2),
      timeline.Span("b", "device", 2, 4.5, 7.0, bytes=4),
      timeline.Span("y", "host", 2, 8.5, 9.0, bytes=8),
      timeline.Span("c", "device", 3, 8.0, 12.0, bytes=16),
      timeline.Span("d", "host", 3, 9.0, 10.0),
    )
  )
  cycle = recorded.cycle(2, 2)
  cut = [(s.name, s.start_s, s.end_s, s.bytes) for s in cycle.spans]
  assert cut == [
    ("b", 5.0, 7.0, 4),
    ("c", 8.0, 9.0, 0),
    ("y", 8.5, 9.0, 8),
  ]
  assert (cycle.window, cycle.window_s()) == ((5.0, 9.0), 4.0)
  assert cycle.idle_s("device") == 1.0
  assert cycle.idle_s("h2d") == 4.0
  assert cycle.exposed_host_s() == 0.0


def test_a_cycle_of_steps_that_are_not_there_is_refused():
  with pytest.raises(ValueError, match="no span of step 0; its steps are"):
    _hand_worked().cycle(1, 2)
