"""The simulator on graphs worked by hand, and on what it refuses."""

import pytest

from sojax.graph.graph import Lane
from sojax.graph.sharing import max_min_speeds
from sojax.graph.simulate import simulate
from sojax.plan.costs import Cost
from sojax.plan.hardware import Resource
from tests.simulating import graph_of

DEVICE, D2H, H2D, HOST, NETWORK = Lane
MEMORY, HBM = Resource.HOST_MEMORY, Resource.DEVICE_MEMORY


def simulate_all(graph, seconds, **settings):
  return simulate(graph, [Cost(float(s)) for s in seconds], **settings)


def spans_of(simulation, step):
  return [*zip(simulation.starts_s[step], simulation.ends_s[step], strict=True)]


def test_a_chain_takes_the_sum_of_its_tasks_and_repeats():
  #   device [0 ][1   ]         |[0 ][1   ]
  #   d2h              [2]      |
  #   host                [3  ] |
  graph = graph_of((DEVICE, [], [3]), (DEVICE, [0]), (D2H, [1]), (HOST, [2]))
  found = simulate_all(graph, [2, 3, 1, 2])
  assert spans_of(found, 0) == [(0, 2), (2, 5), (5, 6), (6, 8)]
  assert spans_of(found, 2) == [(16, 18), (18, 21), (21, 22), (22, 24)]
  assert (found.step_s, found.period) == (8, 1)


def test_tasks_of_different_lanes_overlap():
  #   device [0  ][1  ][2  ]      [0'
  #   d2h         [3 ][4 ]            3 after 0, 4 after 1
  #   host           [5    ][6    ]   5 after 3, 6 after 4; 0' after 6
  graph = graph_of(
    (DEVICE, [], [6]),
    (DEVICE, [0]),
    (DEVICE, [1]),
    (D2H, [0]),
    (D2H, [1]),
    (HOST, [3]),
    (HOST, [4]),
  )
  found = simulate_all(graph, [3, 3, 3, 2, 2, 5, 5])
  assert spans_of(found, 0) == [
    (0, 3),
    (3, 6),
    (6, 9),
    (3, 5),
    (6, 8),
    (5, 10),
    (10, 15),
  ]
  assert found.step_s == 15


def test_a_lane_keeps_the_order_of_issue_though_a_later_task_could_start():
  # 2 is ready at 0, but comes after 1, which waits for the device.
  graph = graph_of((DEVICE, [], [2]), (D2H, [0]), (D2H, []))
  found = simulate_all(graph, [4, 1, 1])
  assert spans_of(found, 0) == [(0, 4), (4, 5), (5, 6)]


def test_a_lane_with_two_issuers_keeps_the_order_of_issue():
  # The host thread issues 1 at 5, the caller 2 and 3 at 0.
  graph = graph_of((HOST, []), (H2D, [0]), (H2D, [], [1]), (H2D, []))
  found = simulate_all(graph, [5, 1, 10, 1])
  assert spans_of(found, 0) == [(0, 5), (11, 12), (0, 10), (10, 11)]


def test_an_issuer_waits_where_issue_is_not_enough():
  # The caller cannot issue 3 before the host has ended 2, nor 4 before 3.
  graph = graph_of(
    (DEVICE, []), (D2H, [0]), (HOST, [1]), (DEVICE, [2]), (DEVICE, [], [])
  )
  found = simulate_all(graph, [1, 1, 5, 1, 1])
  assert spans_of(found, 0) == [(0, 1), (1, 2), (2, 7), (7, 8), (8, 9)]


def test_dispatch_delays_a_device_that_is_faster_than_its_issuer():
  # Programs of 1 s that take 2 s to issue: at 2, 4, 6; the next step at 8.
  graph = graph_of((DEVICE, []), (DEVICE, [0]), (DEVICE, [1]))
  found = simulate_all(graph, [1, 1, 1], dispatch_s=2.0)
  assert spans_of(found, 0) == [(2, 3), (4, 5), (6, 7)]
  assert spans_of(found, 1) == [(8, 9), (10, 11), (12, 13)]
  assert found.step_s == 6


def test_dispatch_hides_behind_a_device_that_is_busy():
  graph = graph_of((DEVICE, []), (DEVICE, [0]), (DEVICE, [1]))
  found = simulate_all(graph, [3, 3, 3], dispatch_s=2.0)
  assert spans_of(found, 0) == [(2, 5), (5, 8), (8, 11)]


def test_the_host_thread_issues_what_follows_its_work_and_then_works_on():
  # 1 and 3 run on the host; 2 follows 1 to the device: the host thread takes
  # 0.5 s to issue it, and only then begins 3. The caller issues 0 meanwhile.
  graph = graph_of((DEVICE, [], [3]), (HOST, []), (H2D, [1]), (HOST, []))
  found = simulate_all(graph, [1, 2, 4, 1], dispatch_s=0.5)
  assert spans_of(found, 0) == [(0.5, 1.5), (0, 2), (2.5, 6.5), (2.5, 3.5)]


def test_the_caller_begins_a_step_when_it_has_issued_the_one_before():
  # The caller has to wait for the host's 1 before it issues 2. The host thread
  # follows it into step 1, not before.
  graph = graph_of((DEVICE, []), (HOST, []), (DEVICE, [1]), (HOST, []))
  found = simulate_all(graph, [1, 2, 10, 1])
  assert spans_of(found, 0) == [(0, 1), (0, 2), (2, 12), (2, 3)]
  # Issued at 2, the next step's 0 runs after 2; its 1 follows step 0's 3.
  assert spans_of(found, 1) == [(12, 13), (3, 5), (13, 23), (5, 6)]


def test_collectives_take_no_dispatch():
  graph = graph_of((NETWORK, [], [1]), (DEVICE, [0]))
  found = simulate_all(graph, [3, 1], dispatch_s=0.5)
  assert spans_of(found, 0) == [(0, 3), (3, 4)]


def test_a_program_is_issued_before_the_collective_that_it_needs_has_ended():
  graph = graph_of((DEVICE, []), (NETWORK, [0]), (DEVICE, [1]))
  found = simulate_all(graph, [3, 3, 1], dispatch_s=1.0)
  assert spans_of(found, 0) == [(1, 4), (4, 7), (7, 8)]


def test_tasks_of_no_seconds_end_at_once():
  graph = graph_of((DEVICE, [], [3]), (D2H, [0]), (HOST, [1]), (H2D, [2]))
  found = simulate_all(graph, [0, 0, 0, 3])
  assert spans_of(found, 1) == [(3, 3), (3, 3), (3, 3), (3, 6)]
  assert simulate_all(graph, [0, 0, 0, 0]).step_s == 0


def test_a_task_of_no_seconds_needs_neither_dispatch_nor_its_lane():
  # 1 keeps the link busy from 3 to 7; 2 has nothing to send.
  graph = graph_of((HOST, [], [1]), (H2D, [0]), (H2D, [0]), (DEVICE, [2]))
  found = simulate_all(graph, [2, 4, 0, 1], dispatch_s=1.0)
  assert spans_of(found, 0) == [(0, 2), (3, 7), (3, 3), (4, 5)]


def test_a_steady_state_may_alternate():
  # Two steps are a circle: 2 (1 s) -> 3 (3 s) -> next 0 (1 s) -> 1 (2 s) ->
  # next 2. It takes 7 s, more than any lane in two steps.
  #   device 0 [2] 1   3 [2] 4   7 [2] 8   10 [2] 11
  #   h2d    1 [3] 4   4 [3] 7   8 [3] 11  11 [3] 14
  #   d2h    0 [0] 1   4 [0] 5   7 [0] 8   11 [0] 12
  #   host   1 [1] 3   5 [1] 7   8 [1] 10  12 [1] 14
  graph = graph_of((D2H, [], [3]), (HOST, [0]), (DEVICE, [], [1]), (H2D, [2]))
  found = simulate_all(graph, [1, 2, 1, 3])
  ends = [max(times) for times in found.ends_s]
  assert ends[:4] == [4, 7, 11, 14]
  assert (found.period, found.step_s) == (2, 3.5)
  assert found.steady().window_s() == 7


def test_a_host_that_falls_behind_for_ever_sets_the_step():
  # Nothing holds the device back: it runs ahead, and no step repeats.
  graph = graph_of((DEVICE, []), (D2H, [0]), (HOST, [1]))
  found = simulate_all(graph, [1, 1, 3], max_steps=12)
  assert found.period is None
  assert found.step_s == 3


# Contention.


def test_two_tasks_share_a_memory_and_the_rest_runs_alone():
  # Both want 4 of 4 bytes/s: half speed for 4 s. Then 1 has 2 s left, alone.
  graph = graph_of((D2H, [], [1]), (HOST, []))
  found = simulate(
    graph,
    [Cost(2.0, {MEMORY: 8.0}), Cost(4.0, {MEMORY: 16.0})],
    capacities={MEMORY: 4.0},
  )
  assert spans_of(found, 0) == [(0, 4), (0, 6)]


def test_a_task_that_arrives_slows_the_one_that_runs():
  # 2 s at full speed, then both at half speed: 0 has 2 s left, takes 4 s; 2
  # has done 2 of its 3 s then.
  graph = graph_of((D2H, [], [2]), (DEVICE, [], [2]), (HOST, [1]))
  found = simulate(
    graph,
    [Cost(4.0, {MEMORY: 4.0}), Cost(2.0), Cost(3.0, {MEMORY: 3.0})],
    capacities={MEMORY: 1.0},
  )
  assert spans_of(found, 0) == [(0, 6), (0, 2), (2, 7)]


def test_a_task_that_wants_more_than_there_is_runs_slower_alone():
  graph = graph_of(
    (HOST, []),
  )
  found = simulate(graph, [Cost(1.0, {MEMORY: 8.0})], capacities={MEMORY: 2.0})
  assert spans_of(found, 0) == [(0, 4)]


def test_without_capacities_nothing_is_shared():
  graph = graph_of((D2H, []), (HOST, []))
  costs = [Cost(2.0, {MEMORY: 8.0}), Cost(4.0, {MEMORY: 16.0})]
  for capacities in (None, {HBM: 1.0}):
    found = simulate(graph, costs, capacities=capacities)
    assert spans_of(found, 0) == [(0, 2), (0, 4)]


def test_speeds_are_raised_together_until_something_is_used_up():
  # The first two fill the memory at 1/4; the third may have what they leave
  # of HBM, 8 - 0.25 * 8 = 6 of 8; the fourth uses neither.
  rates = [
    ((MEMORY, 8.0), (HBM, 8.0)),
    ((MEMORY, 8.0),),
    ((HBM, 8.0),),
    (),
  ]
  speeds = max_min_speeds(rates, {MEMORY: 4.0, HBM: 8.0})
  assert speeds == [0.25, 0.25, 0.75, 1.0]


# What it refuses.


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"costs": []}, "0 costs for a graph of 1 tasks"),
    ({"costs": [Cost(-1.0)]}, "must be finite and at least 0"),
    ({"costs": [Cost(float("nan"))]}, "must be finite and at least 0"),
    ({"costs": [Cost(1.0, {MEMORY: -1.0})]}, "must be finite and at least 0"),
    ({"costs": [Cost(0.0, {MEMORY: 1.0})]}, "takes seconds"),
    ({"dispatch_s": -1.0}, "dispatch_s=-1.0"),
    ({"max_steps": 3}, "max_steps=3"),
    ({"capacities": {MEMORY: 0.0}}, "capacity 0.0 of host_memory"),
  ],
)
def test_it_refuses(settings, message):
  settings = {"costs": [Cost(1.0)]} | settings
  with pytest.raises(ValueError, match=message):
    simulate(graph_of((DEVICE, [])), **settings)


def test_an_empty_graph_is_refused():
  with pytest.raises(ValueError, match="at least one task"):
    simulate(graph_of(), [])
