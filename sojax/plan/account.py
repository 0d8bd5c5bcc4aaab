"""The byte account of a plan: what it takes on the host and on the device."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from sojax.plan.buckets import Bucket, Layout, WireUnit
from sojax.plan.casts import SeparateCasts
from sojax.plan.config import TrainConfig
from sojax.plan.network import Needs, network_bytes
from sojax.plan.plan import DTYPE_BYTES, Plan, WireDtypes
from sojax.plan.records import record_bytes, speculating_buckets
from sojax.plan.residency import Residency

PINNED = ("working_copy", "ring", "gradients", "stage_inputs")
"""The host's purposes whose memory is pinned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
  """Bytes by purpose, at most at any time between and during steps.

  The user's own model is not in it, nor are temporaries inside programs, which
  on several devices are also the weights that a stage gathers, nor what a
  checkpoint takes that is written while no step runs (see `sojax.checkpoint`).

  Attributes:
    host: host memory: "masters" (what is left of them if they are split),
      "moments", "working_copy" (weights that flow, or split masters, pinned),
      "ring" (else, pinned), "gradients" (pinned), "wide_gradients" (of one
      bucket, grad_cast="host_separate"), "accumulators" (accumulate="host"),
      "records" (what takes updates back, with all the room for escapes) and
      "stage_inputs" (activations="offload", pinned).
    device: memory of one device: "weights" (of those that flow what the window
      has, and what stays for backward), "device_buckets" (masters and moments),
      "gradients" (what programs return of them: not those that leave while a
      program runs), "tied_gradients", "partial_sums" (accumulation of what the
      device adds up), "stage_inputs" and "residuals" (activations="keep").
    network: what collectives carry in a step; see
      `sojax.plan.network.network_bytes`.
  """

  host: dict[str, int]
  device: dict[str, int]
  network: dict[str, int]

  @property
  def host_bytes(self) -> int:
    """All host bytes."""
    return sum(self.host.values())

  @property
  def pinned_bytes(self) -> int:
    """Those of the host that are pinned; JAX hands them out."""
    return sum(self.host[name] for name in PINNED)

  @property
  def device_bytes(self) -> int:
    """All device bytes."""
    return sum(self.device.values())

  def table(self) -> str:
    """Returns the account as text, in MiB."""
    rows = [
      (f"{space} {name}", nbytes)
      for space, part in dataclasses.asdict(self).items()
      for name, nbytes in part.items()
    ]
    return "\n".join(f"{name:26}{n / 2**20:12.1f} MiB" for name, n in rows)


def ring_counts(layout: Layout, plan: Plan) -> dict[tuple[int, ...], int]:
  """Returns how many pinned buffers of each shape weights go through.

  Enough for `plan.ring_slots` buckets at once, and never more than there are
  units. Buckets in the working copy need none.
  """
  residency = Residency.of(layout, plan)
  total: collections.Counter[tuple[int, ...]] = collections.Counter()
  most: collections.Counter[tuple[int, ...]] = collections.Counter()
  for bucket in layout.updated_by_host:
    if residency.is_copied(bucket):
      continue
    count = collections.Counter(unit.shape for unit in bucket.units)
    total += count
    most |= count
  return {
    shape: min(total[shape], plan.ring_slots * most[shape]) for shape in total
  }


def make_account(
  layout: Layout,
  plan: Plan,
  config: TrainConfig,
  stage_input_bytes: Sequence[int],
  kept_bytes: Mapping[int, int],
  needs: Sequence[Needs] = (),
) -> Account:
  """Adds up what a plan takes.

  Args:
    layout: the model cut into buckets.
    plan: how a step is carried out.
    config: what is trained.
    stage_input_bytes: bytes of each stage's input for one micro-batch of one
      rank.
    kept_bytes: of each stage that keeps its activations, bytes of what it keeps
      for one micro-batch of one rank.
    needs: what each stage reads; for several devices.

  Returns:
    The account.

  Raises:
    ValueError: if the plan's weights or activations are those of another number
      of stages, or weights of device buckets flow.
  """
  wire = WireDtypes.of(plan, config)
  on_host = [b for b in layout.buckets if not b.on_device]
  on_device = [b for b in layout.buckets if b.on_device]
  residency = Residency.of(layout, plan)
  master_bytes = 2 if plan.master == "split" else 4
  copied = filter(residency.is_copied, on_host)
  ring_elems = sum(
    math.prod(shape) * count
    for shape, count in ring_counts(layout, plan).items()
  )
  inputs = _StageInputs.of(layout, plan, stage_input_bytes)
  grads_on_host, grads_on_device = _gradients(layout, plan, config)
  host = {
    "masters": master_bytes * _elems(on_host),
    "moments": 8 * _elems(layout.updated_by_host),
    "working_copy": wire.weight_bytes * _elems(copied),
    "ring": wire.weight_bytes * ring_elems,
    **grads_on_host,
    "records": sum(
      record_bytes(bucket, plan, layout.num_shards).total
      for bucket in speculating_buckets(layout, plan)
    ),
    "stage_inputs": layout.num_shards * inputs.on_host_bytes,
  }
  working = DTYPE_BYTES[config.working_dtype]
  tied = {i for leaves in layout.model.borrowed for i in leaves}
  leaves = layout.model.leaves
  device = {
    "weights": staying_bytes(layout, plan, config)
    + _flowing(layout, plan, config),
    "device_buckets": 12 * _elems(on_device) // layout.num_shards,
    **grads_on_device,
    "tied_gradients": working
    * sum(leaves[i].size for i in tied if leaves[i].trained),
    "stage_inputs": inputs.on_device_bytes,
    "residuals": sum(kept_bytes.values()),
  }
  network = network_bytes(layout, config, needs)
  return Account(host=host, device=device, network=network)


def _gradients(
  layout: Layout, plan: Plan, config: TrainConfig
) -> tuple[dict[str, int], dict[str, int]]:
  """Returns the bytes of gradients and of their sums, host and device."""
  wire_bytes = WireDtypes.of(plan, config).grad_bytes
  of_host = _elems(layout.updated_by_host)
  of_device = _elems([b for b in layout.buckets if b.on_device])
  adding_on_host = plan.accumulate == "host"
  added_on_device = of_device + (0 if adding_on_host else of_host)
  num_grads = plan.num_grads_on_host(
    layout.model.num_stages, config.accumulation
  )
  at_once = num_grads * of_host
  if plan.park == "device":
    at_once = _largest_run(layout.updated_by_host, plan.ring_slots)
  largest = max((b.size for b in layout.updated_by_host), default=0)
  widening = SeparateCasts.of(plan, config).widen
  on_host = {
    "gradients": wire_bytes * at_once,
    "wide_gradients": 4 * largest if widening else 0,
    "accumulators": 4 * of_host if adding_on_host else 0,
  }
  partial_sums = 4 * added_on_device if config.accumulation > 1 else 0
  returned = of_device
  if plan.transport(layout.model.num_stages) == "dma":
    returned += min(num_grads * of_host, _leaving(layout, plan, config))
  on_device = {
    "gradients": wire_bytes * returned // layout.num_shards,
    "partial_sums": partial_sums // layout.num_shards,
  }
  return on_host, on_device


def _leaving(layout: Layout, plan: Plan, config: TrainConfig) -> int:
  """Returns the elements of the gradients of `grad_window` backwards, at most.

  Of those of all micro-batches, one after the other; the backward that comes
  next is not dispatched before.
  """
  host = [
    _elems(b for b in layout.of_stage(stage) if b.host_updates)
    for stage in reversed(range(layout.model.num_stages))
  ]
  window = plan.grad_window or len(host) * config.accumulation
  in_order = host * min(config.accumulation, 2)
  firsts = range(max(len(in_order) - window, 0) + 1)
  return max(sum(in_order[first : first + window]) for first in firsts)


def _largest_run(buckets: Sequence[Bucket], count: int) -> int:
  """Returns the elements of as many buckets in a row as have most."""
  firsts = range(max(len(buckets) - count, 0) + 1)
  return max(_elems(buckets[first : first + count]) for first in firsts)


@dataclasses.dataclass(frozen=True)
class _StageInputs:
  """Bytes of the stages' inputs, of those that stay and of those that move."""

  staying: int
  moving: tuple[int, ...]

  @classmethod
  def of(
    cls, layout: Layout, plan: Plan, input_bytes: Sequence[int]
  ) -> "_StageInputs":
    policies = plan.activations_by_stage(layout.model.num_stages)
    moving = tuple(
      nbytes
      for policy, nbytes in zip(policies, input_bytes, strict=True)
      if policy == "offload"
    )
    return cls(sum(input_bytes) - sum(moving), moving)

  @property
  def on_device_bytes(self) -> int:
    """Those that stay, and of those that move a few.

    In forward three: a stage's forward is issued once the input of the stage
    before has left, which that stage may still read, so that there is this one,
    its own and its output. From one micro-batch to the next four: the backwards
    of the first two may still run when their next forwards are issued.
    """
    windows = range(max(len(self.moving) - 2, 1))
    in_forward = max(sum(self.moving[i : i + 3]) for i in windows)
    return self.staying + max(in_forward, self._turning)

  @property
  def on_host_bytes(self) -> int:
    return max(sum(self.moving), self._turning)

  @property
  def _turning(self) -> int:
    return 2 * sum(self.moving[:2])


def staying_bytes(layout: Layout, plan: Plan, config: TrainConfig) -> int:
  """Returns the bytes of weight-stationary stages' weights on one device.

  What arrives in another dtype, packed or cut waits as it is for the next use
  of its stage. In float32 the masters of device buckets are working weights. A
  leaf of which parts live on either side keeps its old array meanwhile. On
  several devices every unit stays as it arrives.
  """
  working = DTYPE_BYTES[config.working_dtype]
  on_wire = WireDtypes.of(plan, config).weight_bytes
  arriving = max(working, on_wire)
  masters = [
    unit.size
    for bucket in layout.buckets
    if bucket.on_device and config.working_dtype == "float32"
    for unit in bucket.units
    if _is_whole_leaf(layout, unit)
  ]
  residency = Residency.of(layout, plan)
  staying = [b for b in layout.buckets if not residency.flows(b)]
  elems = {
    host: _elems(b for b in staying if b.on_device is not host)
    for host in (True, False)
  }
  if layout.num_shards > 1:
    own = 0 if config.working_dtype == "float32" else working * elems[False]
    return (on_wire * elems[True] + own) // layout.num_shards
  on_both_sides = sum(
    layout.model.leaves[leaf].size for leaf in layout.on_both_sides
  )
  return arriving * elems[True] + working * (
    elems[False] - sum(masters) + on_both_sides
  )


@dataclasses.dataclass(frozen=True)
class FlowingBytes:
  """Bytes of a bucket's weights on one device, when they have flowed in.

  Attributes:
    whole: of leaves that are used as they arrive.
    packed: of what else arrives; not needed when its use has ended.
    unpacked: of the leaves that are put together from it. On several devices
      there are none outside of programs.
  """

  whole: int
  packed: int
  unpacked: int

  @property
  def during_use(self) -> int:
    """All that there is while a use runs."""
    return self.whole + self.packed + self.unpacked

  @property
  def staying(self) -> int:
    """What stays for a later use."""
    return self.whole + self.unpacked


def flowing_bytes(
  layout: Layout, plan: Plan, config: TrainConfig, bucket: Bucket
) -> FlowingBytes:
  """Returns the bytes of a bucket's weights on one device in weight-flow."""
  working = DTYPE_BYTES[config.working_dtype]
  arriving = WireDtypes.of(plan, config).weight_bytes
  if layout.num_shards > 1:
    return FlowingBytes(arriving * bucket.size // layout.num_shards, 0, 0)
  whole = sum(
    unit.size
    for unit in bucket.units
    if arriving == working and _is_whole_leaf(layout, unit)
  )
  rest = bucket.size - whole
  return FlowingBytes(working * whole, arriving * rest, working * rest)


def _flowing(layout: Layout, plan: Plan, config: TrainConfig) -> int:
  """Bytes of the weights that have flowed in, at most.

  Those of as many uses as the window has, and what stays from forward to
  backward. `levels` has them by the first use that has not ended.
  """
  residency = Residency.of(layout, plan)
  last = layout.model.num_stages - 1
  uses = [(stage, False) for stage in range(last)]
  uses += [(stage, True) for stage in reversed(range(last + 1))]
  uses = [use for use in uses if residency.flowing_to(use[0])]
  ends = {stage: place for place, (stage, _) in enumerate(uses)}
  window = min(plan.flow_window, len(uses) * config.accumulation)
  levels = [0] * len(uses)  # one micro-batch is as the other
  for place, (stage, backward) in enumerate(uses):
    found = [
      flowing_bytes(layout, plan, config, bucket)
      for bucket in residency.fetched_for(stage, backward=backward)
    ]
    during_use = sum(x.during_use for x in found)
    staying = sum(x.staying for x in found)
    for first in range(place - window + 1, place + 1):
      levels[first % len(uses)] += during_use
    if not backward and residency.stay(stage):
      for first in range(place + 1, ends[stage] + 1):
        levels[first] += staying
  return max(levels, default=0)


def _is_whole_leaf(layout: Layout, unit: WireUnit) -> bool:
  first = layout.model.leaves[unit.slices[0].leaf]
  return len(unit.slices) == 1 and unit.shape == first.shape


def _elems(buckets: Iterable[Bucket]) -> int:
  return sum(bucket.size for bucket in buckets)
