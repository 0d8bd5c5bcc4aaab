"""The byte account. Oracle: sums over the model's leaves, made here alone.

Buckets are as large as stages, so that what the account takes from buckets and
wire units follows from leaves: those of one stage and group are updated
together; those of 1 MiB or more cross the link alone, the others packed.
"""

import dataclasses
import math

import pytest

from sojax.plan.account import make_account
from sojax.plan.adamw import adamw
from sojax.plan.buckets import Leaf, ModelShape, plan_buckets
from sojax.plan.config import TrainConfig
from sojax.plan.network import Needs
from sojax.plan.plan import Plan, WireDtypes

MIB = 1 << 20
NAMES = ("embed", "a", "b", "c", "head")
INPUT_BYTES = (64, 512, 8192, 9216, 6144)
KEPT_BYTES = (100, 3000, 5000, 7000, 0)
# Of each stage: shapes, and whether they are trained. Head borrows both of
# embed's. Odd sizes leave padding and groups of codes that are not full.
SHAPES = (
  (((1500, 1555), True), ((13, 11), False)),
  (((700, 1111), True), ((1111,), True), ((35,), True)),
  (((700, 1111), True), ((1111,), True), ((2**20,), False)),
  (((512, 1100), True), ((512, 1100), True), ((77,), True)),
  (((1000, 1300), True), ((777,), True)),
)
BORROWED = ((), (), (), (), (0, 1))
STAGES = range(len(NAMES))


@dataclasses.dataclass(frozen=True)
class Group:
  """The leaves of a stage that are trained, or that are not."""

  stage: int
  trained: bool
  units: tuple[tuple[int, ...], ...]
  whole: tuple[int, ...]  # sizes of leaves that are units

  @property
  def elems(self):
    return sum(math.prod(unit) for unit in self.units)


def groups_of(wire_bytes, ranks):
  """What is updated together, in the order in which backward ends it."""
  found = []
  for stage in reversed(STAGES):
    for trained in (True, False):
      shapes = [shape for shape, of in SHAPES[stage] if of is trained]
      if not shapes:
        continue
      large = [s for s in shapes if wire_bytes * math.prod(s) >= MIB]
      small = [s for s in shapes if s not in large]
      packed = [(sum(map(math.prod, small)),)] if len(small) > 1 else small
      whole = [*large, *(small if len(small) == 1 else [])]
      units = [*large, *packed]
      if ranks > 1:
        units = [(-(-math.prod(u) // ranks) * ranks,) for u in units]
        whole = []
      found.append(
        Group(stage, trained, tuple(units), tuple(map(math.prod, whole)))
      )
  return found


def record_bytes(group, plan, ranks):
  if plan.speculation == "pingpong":
    return 12 * group.elems
  codes = {"record2": 2, "record3": 3}[plan.speculation]
  segments = [math.prod(u) // ranks for u in group.units for _ in range(ranks)]
  offsets = 1 + sum(-(-n // 2**14) for n in segments)
  of_codes = sum(-(-n // 64) * 64 * codes for n in segments)
  escapes = int(plan.escape_bytes_per_param * sum(segments)) // 4
  return 8 * offsets + of_codes + 4 * escapes


def host_sum(plan, config, ranks):
  """Bytes on the host, by purpose; those of all ranks."""
  wire = WireDtypes.of(plan, config)
  groups = groups_of(wire.grad_bytes, ranks)
  trained = [g for g in groups if g.trained]
  at_device = trained[len(trained) - plan.device_buckets :]
  at_host = [g for g in groups if g not in at_device]
  updated = [g for g in at_host if g.trained]
  weights = plan.weights_by_stage(len(NAMES))
  split = plan.master == "split"
  copied = [g for g in at_host if split or weights[g.stage] != "stationary"]
  sent = [g for g in updated if g not in copied]
  slots = {}
  for shape in {unit for g in sent for unit in g.units}:
    counts = [g.units.count(shape) for g in sent]
    slots[shape] = min(sum(counts), plan.ring_slots * max(counts))
  waiting = [updated]
  if plan.park == "device":
    firsts = range(max(len(updated) - plan.ring_slots, 0) + 1)
    waiting = [updated[i : i + plan.ring_slots] for i in firsts]
  records, room = 0, plan.max_record_bytes
  for group in updated if plan.speculation != "wait" else ():
    more = record_bytes(group, plan, ranks)
    if room is not None and records + more > room:
      break
    records += more
  moving = moving_bytes(plan)
  return {
    "masters": (2 if split else 4) * elems(at_host),
    "moments": 4 * elems(updated) + 4 * elems(updated),
    "working_copy": wire.weight_bytes * elems(copied),
    "ring": wire.weight_bytes
    * sum(math.prod(shape) * count for shape, count in slots.items()),
    "gradients": wire.grad_bytes * max(map(elems, waiting)),
    "wide_gradients": 4 * max(g.elems for g in updated)
    if plan.grad_cast == "host_separate" and config.precision != "fp32"
    else 0,
    "accumulators": 4 * elems(updated) if plan.accumulate == "host" else 0,
    "records": records,
    "stage_inputs": ranks * max(sum(moving), 2 * sum(moving[:2])),
  }


def device_sum(plan, config, ranks):
  """Bytes on one device, by purpose."""
  wire = WireDtypes.of(plan, config)
  working = {"fp32": 4, "bf16": 2, "fp16": 2}[config.precision]
  groups = groups_of(wire.grad_bytes, ranks)
  trained = [g for g in groups if g.trained]
  at_device = trained[len(trained) - plan.device_buckets :]
  updated = [g for g in trained if g not in at_device]
  weights = plan.weights_by_stage(len(NAMES))
  staying = [g for g in groups if weights[g.stage] == "stationary"]
  host_staying = [g for g in staying if g not in at_device]
  own = elems(at_device)
  if config.precision == "fp32":  # its masters are the weights
    own -= own if ranks > 1 else sum(sum(g.whole) for g in at_device)
  arrives = wire.weight_bytes
  if ranks == 1:
    arrives = max(arrives, working)
  inputs = [
    size
    for size, policy in zip(
      INPUT_BYTES, plan.activations_by_stage(5), strict=True
    )
    if policy != "offload"
  ]
  moving = moving_bytes(plan)
  added = at_device if plan.accumulate == "host" else trained
  leaving = leaving_elems(plan, config, updated)
  return {
    "weights": (arrives * elems(host_staying) + working * own) // ranks
    + flowing_bytes(plan, config, groups, ranks),
    "device_buckets": 3 * 4 * elems(at_device) // ranks,
    "gradients": wire.grad_bytes * (elems(at_device) + leaving) // ranks,
    "partial_sums": 4 * elems(added) // ranks if config.accumulation > 1 else 0,
    "tied_gradients": working * math.prod(SHAPES[0][0][0]),
    "stage_inputs": sum(inputs)
    + max(
      max(sum(moving[i : i + 3]) for i in range(max(len(moving) - 2, 1))),
      2 * sum(moving[:2]),
    ),
    "residuals": sum(
      size
      for size, policy in zip(
        KEPT_BYTES, plan.activations_by_stage(5), strict=True
      )
      if policy == "keep"
    ),
  }


def elems(groups):
  return sum(group.elems for group in groups)


def moving_bytes(plan):
  policies = plan.activations_by_stage(len(NAMES))
  return [
    n for n, p in zip(INPUT_BYTES, policies, strict=True) if p == "offload"
  ]


def leaving_elems(plan, config, updated):
  """Of gradients on their way: those of so many backwards in a row."""
  if plan.transport(len(NAMES)) != "dma":
    return 0
  if plan.grad_window is None:
    return elems(updated)
  by_stage = [elems([g for g in updated if g.stage == s]) for s in STAGES]
  rows = by_stage[::-1] * min(config.accumulation, 2)
  window = min(plan.grad_window, len(rows))
  most = max(sum(rows[i : i + window]) for i in range(len(rows) - window + 1))
  return min(most, elems(updated))


def flowing_bytes(plan, config, groups, ranks):
  """Weights that have flowed in: of the uses in the window, and what stays."""
  working = {"fp32": 4, "bf16": 2, "fp16": 2}[config.precision]
  arrives = WireDtypes.of(plan, config).weight_bytes
  weights = plan.weights_by_stage(len(NAMES))

  def of_use(stage, packed):
    used = [g for g in groups if g.stage == stage]
    used += [g for g in groups if BORROWED[stage] and g.stage == 0]
    total = 0
    for group in used:
      if weights[group.stage] == "stationary":
        continue
      if ranks > 1:
        total += arrives * group.elems // ranks
        continue
      whole = sum(group.whole) if arrives == working else 0
      rest = group.elems - whole
      total += working * group.elems + (arrives * rest if packed else 0)
    return total

  uses = [(s, "forward") for s in STAGES[:-1]]
  uses += [(s, "backward") for s in reversed(STAGES)]
  uses = [use for use in uses if of_use(use[0], True)]

  def stays(stage):
    return weights[stage] == "flow_once" and stage != len(NAMES) - 1

  most = 0
  for first in range(len(uses)):  # the first use that has not ended
    there = 0
    in_a_row = min(plan.flow_window, len(uses) * config.accumulation)
    for place in range(first, first + in_a_row):
      stage, kind = uses[place % len(uses)]
      if kind == "forward" or not stays(stage):
        there += of_use(stage, True)
    for place, (stage, kind) in enumerate(uses):
      back = uses.index((stage, "backward"))
      if kind == "forward" and stays(stage) and place < first <= back:
        there += of_use(stage, False)
    most = max(most, there)
  return most


MIXED = ("stationary", "flow", "flow_once", "flow", "stationary")
CASES = {
  "plain": {},
  "fp32": {"precision": "fp32"},
  "fp32, some buckets on the device": {
    "precision": "fp32",
    "device_buckets": 2,
  },
  "fp16, widened apart": {"precision": "fp16", "grad_cast": "host_separate"},
  "casts on the device": {"grad_cast": "device", "weight_cast": "device"},
  "flow": {"weights": "flow", "grad_window": 2},
  "flow, a large window": {"weights": "flow", "flow_window": 4},
  "flow, casts on the device": {"weights": "flow", "weight_cast": "device"},
  "flow once": {"weights": "flow_once", "grad_window": 1},
  "mixed": {"weights": MIXED, "device_buckets": 1, "master": "split"},
  "split": {"master": "split", "speculation": "record2"},
  "record3": {"speculation": "record3", "escape_bytes_per_param": 0.3},
  "some records": {"speculation": "record2", "max_record_bytes": 11 * MIB // 2},
  "pingpong": {"speculation": "pingpong", "device_buckets": 2},
  "flow once after flow": {
    "weights": ("stationary", "stationary", "flow", "flow_once", "stationary"),
    "flow_window": 3,
  },
  "fp32, nothing to widen": {"precision": "fp32", "grad_cast": "host_separate"},
  "parked": {"park": "device", "weights": "flow", "master": "split"},
  "parked, three places": {"park": "device", "ring_slots": 3},
  "sums on the host": {"accumulate": "host", "accumulation": 3},
  "sums on the device": {"accumulation": 2, "grad_window": 3},
  "sums on both sides": {
    "accumulate": "host",
    "accumulation": 2,
    "device_buckets": 2,
  },
  "offloaded": {"activations": "offload", "ring_slots": 1},
  "kept": {"activations": "keep", "gradients_out": "callback"},
  "each stage otherwise": {
    "activations": ("keep", "offload", "keep", "offload", "recompute"),
    "weights": MIXED,
  },
}


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_account_is_the_sum_over_the_leaves(case, ranks):
  switches = dict(CASES[case])
  config = TrainConfig(
    micro_batch=1,
    seq_len=8,
    precision=switches.pop("precision", "bf16"),
    accumulation=switches.pop("accumulation", 1),
  )
  plan = Plan(bucket_bytes=1 << 30, **switches)
  leaves = tuple(
    Leaf(name=f"{NAMES[stage]}.{i}", stage=stage, shape=shape, group=group)
    for stage in STAGES
    for i, (shape, trained) in enumerate(SHAPES[stage])
    for group in [0 if trained else None]
  )
  model = ModelShape(
    stage_names=NAMES, leaves=leaves, borrowed=BORROWED, groups=(adamw(1e-3),)
  )
  layout = plan_buckets(
    model,
    bucket_bytes=plan.bucket_bytes,
    elem_bytes=WireDtypes.of(plan, config).grad_bytes,
    device_buckets=plan.device_buckets,
    num_shards=ranks,
  )
  kept = {
    stage: KEPT_BYTES[stage]
    for stage, policy in enumerate(plan.activations_by_stage(len(NAMES)))
    if policy == "keep"
  }
  needs = [Needs(frozenset(range(len(leaves))), frozenset())] * len(NAMES)
  account = make_account(layout, plan, config, INPUT_BYTES, kept, needs)
  assert account.host == host_sum(plan, config, ranks)
  assert account.device == device_sum(plan, config, ranks)
  assert account.host_bytes == sum(account.host.values())
  assert account.device_bytes == sum(account.device.values())


def test_a_leaf_on_both_sides_keeps_its_old_array():
  """Half of it is updated by the host, half on the device."""
  leaf = Leaf(name="w", stage=0, shape=(2**16,), group=0)
  model = ModelShape(
    stage_names=("all",), leaves=(leaf,), borrowed=((),), groups=(adamw(1e-3),)
  )
  config = TrainConfig(micro_batch=1, seq_len=8, precision="bf16")
  plan = Plan(bucket_bytes=2**16, device_buckets=1)
  layout = plan_buckets(
    model, bucket_bytes=plan.bucket_bytes, elem_bytes=2, device_buckets=1
  )
  account = make_account(layout, plan, config, (0,), {})
  assert account.device["weights"] == 2 * 2**15 + 2 * 2**15 + 2 * 2**16
  assert account.device["device_buckets"] == 12 * 2**15
  assert account.host["moments"] == 8 * 2**15
