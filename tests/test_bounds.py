"""Bounds of a step. Oracles: hand-worked steps, and the simulator."""

import hypothesis
from hypothesis import strategies as st

from sojax.graph.bounds import shortest_step_s
from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.graph.simulate import simulate
from sojax.plan.costs import Cost
from tests.simulating import graph_of, random_graphs, scheduled

D, H = Lane.DEVICE, Lane.HOST


def test_the_busiest_lane_bounds_a_step():
  """Two updates of one step, which nothing in the next one waits for."""
  graph = graph_of((D,), (H, [0]), (H, [0]))
  assert shortest_step_s(graph, [1.0, 2.0, 3.0]) == 5.0


def test_the_way_from_a_program_to_its_next_run_bounds_a_step():
  graph = graph_of((D, [], [1]), (H, [0]))
  assert shortest_step_s(graph, [2.0, 3.0]) == 5.0


def test_the_way_leads_over_what_a_lane_runs_before():
  """The next program waits for the second of two transfers."""
  graph = graph_of((D, [], [2]), (Lane.D2H, [0]), (Lane.D2H, [0]))
  assert shortest_step_s(graph, [2.0, 3.0, 4.0]) == 9.0


def test_the_way_leads_over_what_a_thread_runs_before():
  """Weights are sent when the update after theirs has ended, too."""
  graph = graph_of((D, [], [3]), (H, [0]), (H, [0]), (Lane.H2D, [1]))
  assert shortest_step_s(graph, [2.0, 1.0, 5.0, 1.0]) == 9.0


def test_the_way_leads_over_what_a_thread_dispatches_before():
  """Each of two transfers takes half a second of the thread that updates."""
  graph = graph_of(
    (D, [], [4]), (H, [0]), (Lane.H2D, [1]), (H, [0]), (Lane.H2D, [3])
  )
  seconds = [2.0, 1.0, 1.0, 1.0, 1.0]
  assert shortest_step_s(graph, seconds) == 5.0
  assert shortest_step_s(graph, seconds, dispatch_s=0.5) == 6.0


def test_what_takes_no_time_needs_no_lane():
  graph = graph_of((D, [], [2]), (H,), (H, [0]))
  assert shortest_step_s(graph, [2.0, 3.0, 0.0]) == 3.0
  assert shortest_step_s(graph, [2.0, 3.0, 1.0]) == 4.0


def test_the_way_from_validate_is_followed_into_the_next_step():
  """The update between two programs of different steps is on no other way."""
  tasks = [
    Task(index=0, kind=TaskKind.FORWARD, lane=D),
    Task(index=1, kind=TaskKind.BACKWARD, lane=D, prev_deps=(3,)),
    Task(index=2, kind=TaskKind.VALIDATE, lane=D, deps=(1,)),
    Task(index=3, kind=TaskKind.HOST_UPDATE, lane=H, deps=(2,)),
  ]
  assert shortest_step_s(StepGraph(tuple(tasks)), [1.0, 2.0, 1.0, 9.0]) == 12.0


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200, deadline=None)
def test_no_simulated_step_is_shorter(data):
  graph = data.draw(random_graphs() | scheduled().map(lambda x: x.graph))
  whole = st.integers(0, 9)
  seconds = [float(data.draw(whole)) for _ in graph.tasks]
  dispatch_s = data.draw(st.sampled_from([0.0, 0.5]))
  costs = [Cost(s) for s in seconds]
  found = simulate(graph, costs, dispatch_s=dispatch_s)
  if found.period is None:
    return
  bound_s = shortest_step_s(graph, seconds, dispatch_s)
  assert bound_s <= found.step_s * (1 + 1e-9)
