"""The critical path of hand-worked timelines, and what holds for all."""

import hypothesis
import pytest
from hypothesis import strategies as st

from sojax.graph.critical_path import LIMITS, critical_path
from sojax.graph.graph import Lane
from sojax.graph.simulate import simulate
from sojax.graph.timeline import Span, Timeline
from sojax.plan.costs import Cost
from tests.simulating import (
  graph_of,
  has_fixed_lane_order,
  random_graphs,
  scheduled,
)

DEVICE, D2H, H2D, HOST, NETWORK = Lane


def path_of(graph, seconds, **settings):
  found = simulate(graph, [Cost(float(s)) for s in seconds], **settings)
  return critical_path(graph, found.timeline, found.first, found.last), found


def parts(path):
  """Where, seconds and what for, relative to the window."""
  start_s = path.window[0]
  return [
    (part.where, part.start_s - start_s, part.end_s - start_s, part.after)
    for part in path.segments
  ]


def test_a_chain_is_its_own_critical_path():
  graph = graph_of((DEVICE, [], [2]), (D2H, [0]), (HOST, [1]))
  path, found = path_of(graph, [2, 1, 4])
  assert parts(path) == [
    ("device", 0, 2, "dependency"),
    ("d2h", 2, 3, "dependency"),
    ("host", 3, 7, "dependency"),
  ]
  assert path.limit == "host"
  assert path.seconds() == {
    "device": 2,
    "host": 4,
    "link": 1,
    "network": 0,
    "dispatch": 0,
  }
  assert found.step_s == 7


def test_what_others_hide_is_not_on_it():
  # The host's 2 s hide behind the device's second task.
  graph = graph_of((DEVICE, [], [2]), (DEVICE, [0]), (HOST, [0]))
  path, _ = path_of(graph, [3, 4, 2])
  assert path.seconds()["device"] == 7
  assert [part.after for part in path.segments] == ["lane", "dependency"]


def test_a_busy_lane_is_what_a_task_waits_for():
  # 2 waits for the link, which 1 keeps busy until 6, not for 0, since 1.
  graph = graph_of((DEVICE, [], [2]), (D2H, [], [2]), (D2H, [0]))
  path, _ = path_of(graph, [1, 6, 2])
  assert parts(path) == [
    ("d2h", 0, 6, "dependency"),
    ("d2h", 6, 8, "lane"),
  ]
  assert path.limit == "link"


def test_issuing_is_dispatch():
  # Programs of 1 s that take 2 s to issue: the device waits 1 s before each.
  graph = graph_of((DEVICE, []), (DEVICE, [0]))
  path, _ = path_of(graph, [1, 1], dispatch_s=2.0)
  assert path.seconds()["dispatch"] == 2
  assert path.limit in ("device", "dispatch")
  path, _ = path_of(graph, [1, 1], dispatch_s=5.0)
  assert (path.limit, path.seconds()["dispatch"]) == ("dispatch", 8)


def test_a_thread_that_waited_before_is_followed_to_what_it_waited_for():
  # The caller waits for the host's 1 before it issues 2; that is why 3, which
  # depends on nothing, starts at 6 only.
  graph = graph_of((DEVICE, [], [3]), (HOST, [0]), (NETWORK, [1]), (H2D, []))
  path, _ = path_of(graph, [1, 5, 0, 2])
  assert parts(path) == [
    ("device", 0, 1, "dependency"),
    ("host", 1, 6, "dependency"),
    ("h2d", 6, 8, "issue"),
  ]


def test_the_path_is_that_of_the_steady_state_not_of_a_step_s_tail():
  # A step ends with the host's 3, which holds up nothing; the device does.
  graph = graph_of((DEVICE, []), (DEVICE, [0]), (D2H, [1]), (HOST, [2]))
  path, found = path_of(graph, [5, 5, 1, 1])
  num_steps = found.last - found.first + 1
  assert path.seconds()["device"] == 10 * num_steps
  assert {part.where for part in path.segments} == {"device"}


def test_measured_spans_with_gaps_count_as_dispatch():
  graph = graph_of((DEVICE, [], [1]), (HOST, [0]))
  recorded = Timeline(
    [
      Span("forward", "device", 3, 10.0, 11.0, task=0),
      Span("host_update", "host", 3, 11.0, 12.0, task=1),
      Span("forward", "device", 4, 12.5, 14.0, task=0),
      Span("host_update", "host", 4, 14.25, 16.0, task=1),
    ]
  )
  path = critical_path(graph, recorded, 4, 4)
  assert parts(path) == [
    ("dispatch", 0, 0.5, "dependency"),
    ("device", 0.5, 2, "issue"),
    ("dispatch", 2, 2.25, "dependency"),
    ("host", 2.25, 4, "issue"),
  ]
  assert path.table().splitlines() == [
    "on        kind                 path_s  path %",
    "device                         1.5000    37.5",
    "host                           1.7500    43.8",
    "dispatch                       0.7500    18.8",
    "device    forward              1.5000    37.5",
    "dispatch  forward              0.5000    12.5",
    "dispatch  host_update          0.2500     6.2",
    "host      host_update          1.7500    43.8",
    "limit: host",
  ]


def test_spans_of_another_graph_are_refused():
  graph = graph_of((DEVICE, []))
  spans = [Span("x", "device", step, step, step + 1, task=7) for step in (0, 1)]
  with pytest.raises(ValueError, match="names task=7"):
    critical_path(graph, Timeline(spans), 1, 1)


graphs = st.one_of(random_graphs(), scheduled().map(lambda made: made.graph))


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(graphs, st.randoms(use_true_random=False), st.booleans())
def test_the_path_has_no_holes_and_its_seconds_are_those_of_the_steps(
  graph, source, dispatches
):
  seconds = [float(source.randint(0, 9)) for _ in graph.tasks]
  dispatch_s = 2.0 if dispatches else 0.0
  found = simulate(
    graph,
    [Cost(s) for s in seconds],
    dispatch_s=dispatch_s,
    max_steps=12,
  )
  path = critical_path(graph, found.timeline, found.first, found.last)
  edges = [edge for p in path.segments for edge in (p.start_s, p.end_s)]
  if path.window[0] < path.window[1]:
    assert (edges[0], edges[-1]) == path.window
    assert edges[1:-1:2] == edges[2::2]
  num_steps = found.last - found.first + 1
  total_s = sum(path.seconds().values())
  assert total_s == pytest.approx(num_steps * found.step_s, abs=1e-9)
  assert set(path.seconds()) == set(LIMITS)
  if not dispatches and has_fixed_lane_order(graph):
    # Else the timeline may lack a later step's transfer that kept a lane busy.
    assert path.seconds()["dispatch"] == 0
