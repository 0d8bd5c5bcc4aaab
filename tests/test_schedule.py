"""The step graph. Oracle: the edges of docs/design.md, written out by hand."""

import itertools

import pytest

from sojax.graph.graph import Lane, TaskKind
from sojax.graph.schedule import schedule
from sojax.plan.account import make_account
from sojax.plan.adamw import adamw
from sojax.plan.buckets import Leaf, ModelShape, plan_buckets
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan


def tied_model(num_blocks):
  """A model of embed, blocks and a head that borrows embed's table."""
  names = ["embed", *(f"block_{i}" for i in range(num_blocks)), "head"]
  leaves = [
    Leaf(name=f"{name}.w", stage=i, shape=(1 << 14,), group=0)
    for i, name in enumerate(names)
  ]
  borrowed = [()] * (num_blocks + 1) + [(0,)]
  return ModelShape(
    stage_names=tuple(names),
    leaves=tuple(leaves),
    borrowed=tuple(borrowed),
    groups=(adamw(1e-3),),
  )


def input_bytes(num_blocks):
  """Bytes of stage inputs, each another number."""
  return [32, *(128 * stage for stage in range(1, num_blocks + 2))]


def layout_of(num_blocks, device_buckets=0):
  return plan_buckets(
    tied_model(num_blocks),
    bucket_bytes=1 << 16,
    elem_bytes=4,
    device_buckets=device_buckets,
  )


def graph_of(num_blocks=2, accumulation=1, **switches):
  plan = Plan(bucket_bytes=1 << 16, **switches)
  config = TrainConfig(micro_batch=1, seq_len=8, accumulation=accumulation)
  layout = layout_of(num_blocks, plan.device_buckets)
  return schedule(layout, plan, config, input_bytes(num_blocks))


def of_kind(graph, kind):
  return [task for task in graph.tasks if task.kind is kind]


def edges(graph, dep="deps"):
  return {
    task.name: [graph.tasks[i].name for i in getattr(task, dep)]
    for task in graph.tasks
  }


def test_a_stationary_step_has_the_edges_of_the_design():
  graph = graph_of(num_blocks=1)
  assert edges(graph) == {
    "host_scalars": [],
    "forward stage=0 micro=0": [],
    "forward stage=1 micro=0": ["forward stage=0 micro=0"],
    "backward stage=2 micro=0": ["forward stage=1 micro=0"],
    "grad_out stage=2 bucket=0 micro=0": ["backward stage=2 micro=0"],
    "backward stage=1 micro=0": ["backward stage=2 micro=0"],
    "grad_out stage=1 bucket=1 micro=0": ["backward stage=1 micro=0"],
    "backward stage=0 micro=0": ["backward stage=1 micro=0"],
    "grad_out stage=0 bucket=2 micro=0": ["backward stage=0 micro=0"],
    "validate": [
      *(f"backward stage={stage} micro=0" for stage in (2, 1, 0)),
      "host_scalars",
    ],
    **{
      name: deps
      for stage, bucket in ((2, 0), (1, 1), (0, 2))
      for name, deps in (
        (
          f"host_update stage={stage} bucket={bucket}",
          [f"grad_out stage={stage} bucket={bucket} micro=0", "validate"],
        ),
        (
          f"weight_in stage={stage} bucket={bucket}",
          [f"host_update stage={stage} bucket={bucket}"],
        ),
      )
    },
  }
  carried = edges(graph, "prev_deps")
  assert carried["forward stage=0 micro=0"] == [
    "validate",
    "weight_in stage=0 bucket=2",
  ]
  assert carried["forward stage=1 micro=0"] == ["weight_in stage=1 bucket=1"]
  assert carried["backward stage=2 micro=0"] == [
    "weight_in stage=2 bucket=0",
    "weight_in stage=0 bucket=2",
  ]
  assert carried["validate"] == ["validate"]
  assert carried["host_scalars"] == ["validate"]
  updates = [t.bucket for t in of_kind(graph, TaskKind.HOST_UPDATE)]
  assert updates == [2, 1, 0], "the next forward needs the last one first"


@pytest.mark.parametrize(
  "switches",
  [
    {},
    {"weights": "flow"},
    {"accumulation": 3},
    {"accumulation": 3, "accumulate": "host"},
    {"activations": "offload"},
  ],
  ids=str,
)
def test_gradients_that_backward_delivers_wait_for_what_it_waits_for(switches):
  """Everything else is as it is where they leave after it."""
  graphs = {
    transport: graph_of(gradients_out=transport, **switches)
    for transport in ("dma", "callback", "io_callback")
  }
  assert graphs["callback"] == graphs["io_callback"]
  for ours, theirs in zip(
    graphs["callback"].tasks, graphs["dma"].tasks, strict=True
  ):
    if ours.kind is not TaskKind.GRAD_OUT:
      assert ours == theirs
      continue
    (backward,) = (graphs["callback"].tasks[i] for i in theirs.deps)
    assert backward.kind is TaskKind.BACKWARD
    assert (ours.deps, ours.prev_deps) == (backward.deps, backward.prev_deps)
    assert ours.index > backward.index


def test_device_buckets_skip_the_host():
  graph = graph_of(num_blocks=1, device_buckets=1)
  of_bucket = [t for t in graph.tasks if t.bucket == 2]
  (update,) = of_bucket
  assert (update.kind, update.lane) == (TaskKind.DEVICE_UPDATE, Lane.DEVICE)
  assert edges(graph)[update.name] == ["backward stage=0 micro=0", "validate"]
  carried = edges(graph, "prev_deps")["forward stage=0 micro=0"]
  assert carried == ["validate", update.name]


def test_only_the_last_micro_batch_sends_gradients():
  graph = graph_of(accumulation=3)
  last_uses = [
    t.index for t in of_kind(graph, TaskKind.BACKWARD) if t.micro == 2
  ]
  for task in of_kind(graph, TaskKind.GRAD_OUT):
    assert set(task.deps) <= set(last_uses)
  uses = [t for t in graph.tasks if t.kind in ("forward", "backward")]
  assert len(uses) == 3 * 7
  assert [t.micro for t in uses] == [0] * 7 + [1] * 7 + [2] * 7


@pytest.mark.parametrize("window", [2, 3, 5, 99])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_flow_never_has_more_weights_on_the_device_than_its_window(
  window, accumulation
):
  """Plays three steps: transfers as early as their edges let them start."""
  graph = graph_of(
    num_blocks=4, accumulation=accumulation, weights="flow", flow_window=window
  )
  uses = [t for t in graph.tasks if t.kind in ("forward", "backward")]
  fetches = of_kind(graph, TaskKind.WEIGHT_IN)
  arrivals = {
    use.index: [dep for dep in use.deps if graph.tasks[dep] in fetches]
    for use in uses
  }
  use_of = {f: use for use, group in arrivals.items() for f in group}
  ended: set[tuple[int, int]] = set()
  for step, use in itertools.product(range(3), uses):
    live = set()
    for later in (step, step + 1):
      for fetch in fetches:
        needs = [(later, dep) for dep in fetch.deps] + [
          (later - 1, dep)
          for dep in fetch.prev_deps
          if later > 0 and graph.tasks[dep].lane is Lane.DEVICE
        ]
        may_start = all(need in ended for need in needs)
        if may_start and (later, use_of[fetch.index]) not in ended:
          live.add((later, use_of[fetch.index]))
    assert len(live) <= window
    assert (step, use.index) in live
    ended.add((step, use.index))


def test_flow_issues_a_use_before_it_waits_for_the_one_before():
  graph = graph_of(num_blocks=4, weights="flow")
  uses = [t.index for t in graph.tasks if t.kind in ("forward", "backward")]
  for fetch in of_kind(graph, TaskKind.WEIGHT_IN):
    for freed in fetch.deps:
      after = uses[uses.index(freed) + 1]
      assert after < fetch.index, "the device would have nothing to do"


def test_flow_fetches_tied_weights_for_the_borrower():
  graph = graph_of(num_blocks=1, weights="flow")
  head = [t for t in of_kind(graph, TaskKind.WEIGHT_IN) if t.stage == 2]
  assert [t.bucket for t in head] == [0, 2]
  updates = {t.bucket: t.index for t in of_kind(graph, TaskKind.HOST_UPDATE)}
  for fetch in of_kind(graph, TaskKind.WEIGHT_IN):
    assert updates[fetch.bucket] in fetch.prev_deps


def test_transfers_carry_the_bytes_of_their_bucket():
  graph = graph_of(num_blocks=1)
  moved = [(t.kind, t.bytes) for t in graph.tasks if t.bytes]
  assert moved == [("grad_out", 1 << 16)] * 3 + [("weight_in", 1 << 16)] * 3


# Activations that move.


def test_an_offloading_step_has_the_edges_of_the_design():
  graph = graph_of(num_blocks=3, activations="offload")
  all_edges = edges(graph)
  compute = {
    name: deps
    for name, deps in all_edges.items()
    if name.startswith(("forward", "backward", "activation"))
  }
  assert compute == {
    "forward stage=0 micro=0": [],
    "activation_out stage=1 micro=0": ["forward stage=0 micro=0"],
    "forward stage=1 micro=0": ["forward stage=0 micro=0"],
    "activation_out stage=2 micro=0": ["forward stage=1 micro=0"],
    "forward stage=2 micro=0": [
      "forward stage=1 micro=0",
      "activation_out stage=1 micro=0",
    ],
    "activation_out stage=3 micro=0": ["forward stage=2 micro=0"],
    "forward stage=3 micro=0": [
      "forward stage=2 micro=0",
      "activation_out stage=2 micro=0",
    ],
    "backward stage=4 micro=0": ["forward stage=3 micro=0"],
    "activation_in stage=3 micro=0": [
      "activation_out stage=3 micro=0",
      "forward stage=3 micro=0",
    ],
    "backward stage=3 micro=0": [
      "backward stage=4 micro=0",
      "activation_in stage=3 micro=0",
    ],
    "activation_in stage=2 micro=0": [
      "activation_out stage=2 micro=0",
      "backward stage=4 micro=0",
    ],
    "backward stage=2 micro=0": [
      "backward stage=3 micro=0",
      "activation_in stage=2 micro=0",
    ],
    "activation_in stage=1 micro=0": [
      "activation_out stage=1 micro=0",
      "backward stage=3 micro=0",
    ],
    "backward stage=1 micro=0": [
      "backward stage=2 micro=0",
      "activation_in stage=1 micro=0",
    ],
    "backward stage=0 micro=0": ["backward stage=1 micro=0"],
  }
  lanes = {(t.kind, t.lane) for t in graph.tasks if t.kind.startswith("activ")}
  assert lanes == {
    (TaskKind.ACTIVATION_OUT, Lane.D2H),
    (TaskKind.ACTIVATION_IN, Lane.H2D),
  }


def test_only_the_stages_that_offload_move_their_inputs():
  mixed = ("keep", "offload", "recompute", "keep", "offload")
  graph = graph_of(num_blocks=3, activations=mixed, accumulation=2)
  for kind in (TaskKind.ACTIVATION_OUT, TaskKind.ACTIVATION_IN):
    moves = [(t.micro, t.stage, t.bytes) for t in of_kind(graph, kind)]
    assert moves == [(0, 1, 128), (1, 1, 128)]
  for policy in ("recompute", "keep"):
    assert graph_of(activations=policy) == graph_of()


@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_an_input_comes_back_while_the_device_has_work(weights):
  graph = graph_of(num_blocks=4, activations="offload", weights=weights)
  uses = [t.index for t in graph.tasks if t.kind in ("forward", "backward")]
  fetches = of_kind(graph, TaskKind.ACTIVATION_IN)
  assert len(fetches) == 4
  for fetch in fetches:
    freed = [i for i in fetch.deps if i in uses]
    (place,) = (uses.index(i) for i in freed)
    assert uses[place + 1] < fetch.index < uses[place + 2]


class Played:
  """Plays steps: tasks are issued in order, as early as the executor may.

  Device tasks end as late as possible: only when nothing can be issued.
  Transfers end at once if they are fast, and otherwise just as late.
  """

  def __init__(self, graph, *, fast_transfers):
    self.tasks = graph.tasks
    self.fast = fast_transfers
    self.done = set()
    self.issued = []
    self.most_bytes = {"device": 0, "fetched": 0, "host": 0}

  def play(self, num_steps):
    for step, task in itertools.product(range(num_steps), self.tasks):
      while not self._ready(step, task):
        self._end_oldest()
      self.issued.append((step, task.index))
      if self.fast or task.lane is Lane.HOST:
        self._end_fast()
      for where, nbytes in self._count().items():
        self.most_bytes[where] = max(self.most_bytes[where], nbytes)

  def _satisfied(self, step, dep, task):
    """The executor's rule, written once more."""
    if step < 0 or (step, dep) in self.done:
      return True
    before = self.tasks[dep]
    is_array = before.lane in (Lane.DEVICE, Lane.H2D)
    chained = task.lane in (Lane.DEVICE, Lane.D2H) and is_array
    both_validate = task.kind is before.kind is TaskKind.VALIDATE
    return chained and not both_validate and (step, dep) in self.issued

  def _ready(self, step, task):
    return all(self._satisfied(step, d, task) for d in task.deps) and all(
      self._satisfied(step - 1, d, task) for d in task.prev_deps
    )

  def _ends(self, key):
    """Whether everything that a task reads is there."""
    step, index = key
    task = self.tasks[index]
    return all((step, d) in self.done for d in task.deps) and all(
      step == 0 or (step - 1, d) in self.done for d in task.prev_deps
    )

  def _end_oldest(self):
    waiting = [k for k in self.issued if k not in self.done and self._ends(k)]
    slow = [k for k in waiting if self.tasks[k[1]].lane is not Lane.DEVICE]
    self.done.add((slow or waiting)[0])

  def _end_fast(self):
    for key in self.issued:
      on_device = self.tasks[key[1]].lane is Lane.DEVICE
      if key not in self.done and not on_device and self._ends(key):
        self.done.add(key)

  def _count(self):
    """Bytes of moving inputs: allocated when issued, freed after last use."""
    by_name = {}
    for step, index in self.issued:
      task = self.tasks[index]
      by_name[step, task.micro, task.kind, task.stage] = (step, index)
    count = dict.fromkeys(self.most_bytes, 0)
    for task in self.tasks:
      if task.kind is not TaskKind.ACTIVATION_OUT:
        continue
      steps = {step for step, _ in self.issued}
      for step in steps:
        made, read, out, back, used = (
          by_name.get((step, task.micro, kind, stage))
          for kind, stage in (
            (TaskKind.FORWARD, task.stage - 1),
            (TaskKind.FORWARD, task.stage),
            (TaskKind.ACTIVATION_OUT, task.stage),
            (TaskKind.ACTIVATION_IN, task.stage),
            (TaskKind.BACKWARD, task.stage),
          )
        )
        if made and not {read, out} <= self.done:
          count["device"] += task.bytes
        if back and used not in self.done:
          count["device"] += task.bytes
          count["fetched"] += task.bytes
        if out and back not in self.done:
          count["host"] += task.bytes
    return count


@pytest.mark.parametrize("fast_transfers", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("device_buckets", [0, 99])
@pytest.mark.parametrize(
  "activations",
  [
    "offload",
    ("keep", "offload") * 4,
    ("keep", "offload", "offload", "keep") * 2,
    (*["recompute"] * 6, "offload", "offload"),
  ],
  ids=str,
)
def test_moving_inputs_never_take_more_than_the_account_says(
  fast_transfers, accumulation, device_buckets, activations
):
  """Eight stages. With every bucket on the device nothing but the device
  itself holds the next step back."""
  switches = {"activations": activations, "accumulation": accumulation}
  if device_buckets:
    switches["device_buckets"] = len(layout_of(6).buckets)
  graph = graph_of(num_blocks=6, **switches)
  played = Played(graph, fast_transfers=fast_transfers)
  played.play(3)
  account, moving = account_of(6, **switches)
  neighbours = [sum(moving[i : i + 2]) for i in range(len(moving))]
  assert 0 < played.most_bytes["fetched"] <= max(neighbours)
  staying = sum(input_bytes(6)) - sum(moving)
  on_device = account.device["stage_inputs"] - staying
  assert played.most_bytes["device"] <= on_device
  assert played.most_bytes["host"] <= account.host["stage_inputs"]
  if activations == "offload":
    assert on_device == 128 * (4 + 5 + 6)
    assert account.host["stage_inputs"] == 128 * (1 + 2 + 3 + 4 + 5 + 6)


def account_of(num_blocks, accumulation=1, **switches):
  """Returns the account of graph_of's plan, and the inputs that move."""
  plan = Plan(bucket_bytes=1 << 16, **switches)
  config = TrainConfig(micro_batch=1, seq_len=8, accumulation=accumulation)
  layout = layout_of(num_blocks, plan.device_buckets)
  inputs = input_bytes(num_blocks)
  policies = plan.activations_by_stage(num_blocks + 2)
  moving = [
    nbytes
    for policy, nbytes in zip(policies, inputs, strict=True)
    if policy == "offload"
  ]
  return make_account(layout, plan, config, inputs, {}), moving
