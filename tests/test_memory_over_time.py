"""Memory over time: by hand, and against the plan's account."""

import hypothesis
import pytest
from hypothesis import strategies as st

from sojax.graph.graph import Lane, TaskKind
from sojax.graph.memory import Space, memory_over_time
from sojax.graph.simulate import simulate
from sojax.plan.account import make_account
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Cost
from sojax.plan.plan import Plan
from tests.simulating import schedule_of, scheduled, workload_of

WIRE = 4 << 14  # bytes of embed; a block has two times, the head three


def followed(num_blocks=1, precision="fp32", **switches):
  """Simulates with 2 s on the device, 1 s on the link and 4 s on the host.

  What is said is said of the first step, until the second one's forward.
  """
  made = schedule_of(
    workload_of(num_blocks),
    Plan(bucket_bytes=WIRE * 3, **switches),
    TrainConfig(micro_batch=1, seq_len=8, precision=precision),
  )
  seconds = {Lane.DEVICE: 2.0, Lane.D2H: 1.0, Lane.H2D: 1.0, Lane.HOST: 4.0}
  nothing = (TaskKind.VALIDATE, TaskKind.HOST_SCALARS, TaskKind.WEIGHT_RESEND)
  costs = [
    Cost(0.0 if task.kind in nothing else seconds[task.lane])
    for task in made.graph.tasks
  ]
  found = simulate(made.graph, costs)
  first = next(
    task.index for task in made.graph.tasks if task.lane is Lane.DEVICE
  )
  until_s = found.starts_s[1][first]
  memory = memory_over_time(
    found.timeline, made.graph, made.workload, made.plan, made.config
  )

  def of(space, name):
    level = memory.levels[space, name]
    pairs = zip(level.times_s, level.bytes, strict=True)
    return [(t, n) for t, n in pairs if t < until_s]

  return of, memory


def test_gradients_and_records_of_updates_that_wait():
  #   device  F0 0-2 F1 2-4 B2 4-6 B1 6-8 B0 8-10 V 10
  #   d2h     head 6-7, block 8-9, embed 10-11
  #   host    embed 11-15, block 15-19, head 19-23
  of, memory = followed(num_blocks=1)
  assert of(Space.DEVICE, "gradients") == [
    (0, 0),
    (6, 3 * WIRE),
    (7, 0),
    (8, 2 * WIRE),
    (9, 0),
    (10, WIRE),
    (11, 0),
  ]
  assert of(Space.PINNED, "gradients") == [
    (0, 0),
    (6, 3 * WIRE),
    (8, 5 * WIRE),
    (10, 6 * WIRE),
    (15, 5 * WIRE),
  ]
  # Forward of the next step starts at 16, before the others are updated.
  assert (Space.ARENA, "records") not in memory.levels
  assert memory.base[Space.ARENA, "moments"] == 2 * 6 * WIRE


def test_records_live_until_their_update_is_settled():
  #   device  F0 0-2 F1 2-4 B2 4-6 B1 6-8 B0 8-10 V 10
  #   host    head 7-11, block 11-15, embed 15-19, settle embed, block, head
  #           4 s each: 19-23, 23-27, 27-31
  of, memory = followed(
    num_blocks=1, speculation="pingpong", speculate="always"
  )
  copy = 3 * WIRE
  assert of(Space.ARENA, "records") == [
    (0, 0),
    (7, 3 * copy),
    (11, 5 * copy),
    (15, 6 * copy),
  ]
  assert of(Space.PINNED, "gradients") == [
    (0, 0),
    (6, 3 * WIRE),
    (8, 5 * WIRE),
    (10, 6 * WIRE),
  ]
  # The next step's forward starts at 23, when embed is settled.
  for purpose in ((Space.ARENA, "records"), (Space.PINNED, "gradients")):
    level = memory.levels[purpose]
    left = dict(zip(level.times_s, level.bytes, strict=True))
    assert [left[t] / level.peak for t in (23, 27)] == [5 / 6, 3 / 6]


def test_stage_inputs_of_recomputing_stages_wait_for_their_backward():
  # Input of stage 0: 0-10; of 1, made by F0: 0-8; of the head, by F1: 2-6.
  of, _ = followed(num_blocks=1)
  assert of(Space.DEVICE, "stage_inputs") == [
    (0, 100 + 107),
    (2, 100 + 107 + 114),
    (6, 100 + 107),
    (8, 100),
    (10, 0),
  ]


def test_residuals_live_from_forward_to_backward():
  of, memory = followed(num_blocks=1, activations="keep")
  assert of(Space.DEVICE, "residuals")[:5] == [
    (0, 0),
    (2, 1000),
    (4, 1000 + 1011),
    (8, 1000),
    (10, 0),
  ]
  assert (Space.PINNED, "stage_inputs") in memory.base


def test_offloaded_inputs_leave_and_come_back():
  #   device  F0 0-2 F1 2-4 F2 4-6 B3 6-8 B2 8-10 B1 10-12 B0 12-14
  #   d2h     input 1: 2-3, input 2: 4-5
  #   h2d     input 2: 6-7 (after F2), input 1: 8-9 (after B3)
  of, _ = followed(num_blocks=2, activations="offload")
  assert of(Space.PINNED, "stage_inputs") == [
    (0, 0),
    (2, 107),
    (4, 107 + 114),
    (7, 107),
    (9, 0),
  ]
  head, embed = 121, 100
  assert of(Space.DEVICE, "stage_inputs")[:9] == [
    (0, embed + 107),  # F0 makes input 1
    (2, embed + 107 + 114),
    (4, embed + 114 + head),  # F1 has read input 1, which has left
    (6, embed + head + 114),  # F2 has read input 2; it comes back
    (8, embed + 114 + 107),
    (10, embed + 107),
    (12, embed),
    (14, 0),
  ]


def test_weights_that_flow_stay_until_the_end_of_their_use():
  #   h2d     0-1 embed for F0, 1-2 head and 2-3 embed for B1, 3-4 embed for B0,
  #           which waits for the end of F0
  #   device  F0 1-3, B1 3-5, B0 5-7
  of, _ = followed(num_blocks=0, weights="flow")
  assert of(Space.DEVICE, "weights") == [
    (0, WIRE),
    (1, 3 * WIRE),
    (2, 4 * WIRE),
    (3, 4 * WIRE),
    (5, WIRE),
    (7, 0),
    (12, WIRE),  # the next step's, when embed has been updated
  ]


def test_weights_that_are_put_together_take_as_much_again_during_their_use():
  of, _ = followed(
    num_blocks=0, weights="flow", precision="bf16", weight_cast="device"
  )
  assert of(Space.DEVICE, "weights") == [
    (0, WIRE),
    (1, WIRE // 2 + 3 * WIRE),
    (2, WIRE // 2 + 4 * WIRE),
    (3, 4 * WIRE + 3 * WIRE // 2),
    (5, WIRE + WIRE // 2),
    (7, 0),
    (12, WIRE),  # the next step's, when embed has been updated
  ]


def test_weights_that_stay_for_backward_are_freed_at_its_end():
  #   h2d     0-1 embed for F0, 1-2 block for F1, then, after the end of F0,
  #           3-4 head and 4-5 embed for B2
  #   device  F0 1-3, F1 3-5, B2 5-7, B1 7-9, B0 9-11
  of, _ = followed(num_blocks=1, weights="flow_once")
  embed, block, head = WIRE, 2 * WIRE, 3 * WIRE
  assert of(Space.DEVICE, "weights")[:7] == [
    (0, embed),
    (1, embed + block),
    (3, embed + block + head),
    (4, embed + block + head + embed),
    (7, embed + block),
    (9, embed),
    (11, 0),
  ]


def test_weights_of_some_stages_stay_while_those_of_others_flow():
  #   h2d     0-1 head for B2, which waits for nothing
  #   device  F0 0-2, F1 2-4, B2 4-6
  mix = ("stationary", "stationary", "flow")
  of, memory = followed(num_blocks=1, weights=mix)
  stay, head = WIRE + 2 * WIRE, 3 * WIRE
  assert of(Space.DEVICE, "weights") == [(0, stay + head), (6, stay)]
  inputs, tied = 100 + 107, memory.base[Space.DEVICE, "tied_gradients"]
  assert memory.totals[Space.DEVICE].bytes[0] == stay + head + inputs + tied
  assert (Space.DEVICE, "weights") not in memory.base


def peaks_and_account(made, seed_seconds):
  found = simulate(made.graph, [Cost(s) for s in seed_seconds], max_steps=8)
  memory = memory_over_time(
    found.timeline, made.graph, made.workload, made.plan, made.config
  )
  policies = made.plan.activations_by_stage(len(made.workload.stages))
  kept = {
    stage: made.workload.stages[stage].kept_bytes
    for stage, policy in enumerate(policies)
    if policy == "keep"
  }
  account = make_account(
    made.layout,
    made.plan,
    made.config,
    made.workload.input_bytes,
    kept,
    made.workload.needs,
  )
  return memory, account


@hypothesis.settings(deadline=None, max_examples=80)
@hypothesis.given(scheduled(), st.randoms(use_true_random=False))
def test_no_peak_is_above_the_account(made, source):
  seconds = [float(source.randint(0, 9)) for _ in made.graph.tasks]
  memory, account = peaks_and_account(made, seconds)
  for (space, name), level in memory.levels.items():
    part = account.device if space is Space.DEVICE else account.host
    assert level.peak <= part[name], (space, name)
    assert min(level.bytes) >= 0
    if name != "weights":  # some of them may stay
      assert level.bytes[-1] == 0
  on_host = memory.totals[Space.PINNED].peak + memory.totals[Space.ARENA].peak
  assert on_host <= account.host_bytes
  assert memory.totals[Space.DEVICE].peak <= account.device_bytes
  names = {name for space, name in [*memory.base, *memory.levels]}
  assert names == {*account.host, *account.device}


@pytest.mark.parametrize(
  "switches",
  [
    {},
    {"weights": "flow", "flow_window": 3},
    {"weights": "flow_once", "flow_window": 3},
    {"weights": ("flow_once", "stationary") * 3},
    {"weights": ("stationary", "flow", "flow_once") * 2},
    {"speculation": "record3"},
    {"activations": "keep"},
    {"activations": "offload"},
    {"park": "device"},
    {"accumulate": "host"},
  ],
  ids=str,
)
def test_the_account_is_reached_where_one_lane_is_slow(switches):
  """So the account is no more than what is needed, whatever tasks take."""
  made = schedule_of(
    workload_of(4),
    Plan(bucket_bytes=WIRE * 3, **switches),
    TrainConfig(micro_batch=1, seq_len=8, accumulation=2),
  )
  reached = {}
  for slow in Lane:
    seconds = [100.0 if t.lane is slow else 1.0 for t in made.graph.tasks]
    memory, account = peaks_and_account(made, seconds)
    for (space, name), level in memory.levels.items():
      part = account.device if space is Space.DEVICE else account.host
      share = level.peak / part[name] if part[name] else 1.0
      reached[space, name] = max(reached.get((space, name), 0.0), share)
  if switches == {"activations": "offload"}:
    # Its inputs are counted as of when programs are issued, before they run.
    assert 0.5 < reached.pop((Space.DEVICE, "stage_inputs")) < 1
  assert set(reached.values()) == {1.0}
