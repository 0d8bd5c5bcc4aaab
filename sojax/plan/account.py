"""The byte account of a plan: what it takes on the host and on the device."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from sojax.plan.buckets import Bucket, Layout, WireUnit
from sojax.plan.config import TrainConfig
from sojax.plan.network import Needs, network_bytes
from sojax.plan.plan import DTYPE_BYTES, Plan, WireDtypes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
  """Bytes by purpose, at most at any time between and during steps.

  The user's own model is not in it, nor are temporaries inside programs, which
  on several devices are also the weights that a stage gathers.

  Attributes:
    host: host memory: "masters", "moments", "working_copy" (weight-flow,
      pinned), "ring" (weight-stationary, pinned), "gradients" (pinned),
      "accumulators" (accumulate="host") and "stage_inputs"
      (activations="offload", pinned).
    device: memory of one device: "weights" (in weight-flow those of the
      window), "device_buckets" (masters and moments), "gradients" (what
      programs return of them: not those that leave while a program runs),
      "tied_gradients", "partial_sums" (accumulation of what the device adds
      up), "stage_inputs" and "residuals" (activations="keep").
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
  units. Weight-flow needs none.
  """
  total: collections.Counter[tuple[int, ...]] = collections.Counter()
  most: collections.Counter[tuple[int, ...]] = collections.Counter()
  if plan.weights == "flow":
    return {}
  for bucket in _trained_on_host(layout):
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
    ValueError: if the plan's activations are those of another number of stages.
  """
  wire = WireDtypes.of(plan, config)
  on_host = [b for b in layout.buckets if not b.on_device]
  on_device = [b for b in layout.buckets if b.on_device]
  flow = plan.weights == "flow"
  ring_elems = sum(
    math.prod(shape) * count
    for shape, count in ring_counts(layout, plan).items()
  )
  inputs = _StageInputs.of(layout, plan, stage_input_bytes)
  grads_on_host, grads_on_device = _gradients(layout, plan, config)
  host = {
    "masters": 4 * _elems(on_host),
    "moments": 8 * _elems(_trained_on_host(layout)),
    "working_copy": wire.weight_bytes * _elems(on_host) if flow else 0,
    "ring": wire.weight_bytes * ring_elems,
    **grads_on_host,
    "stage_inputs": layout.num_shards * inputs.on_host_bytes,
  }
  working = DTYPE_BYTES[config.working_dtype]
  tied = {i for leaves in layout.model.borrowed for i in leaves}
  leaves = layout.model.leaves
  device = {
    "weights": (_flowing if flow else _stationary)(layout, plan, config),
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
  of_host = _elems(_trained_on_host(layout))
  of_device = _elems([b for b in layout.buckets if b.on_device])
  adding_on_host = plan.accumulate == "host"
  added_on_device = of_device + (0 if adding_on_host else of_host)
  num_grads = plan.num_grads_on_host(
    layout.model.num_stages, config.accumulation
  )
  on_host = {
    "gradients": wire_bytes * num_grads * of_host,
    "accumulators": 4 * of_host if adding_on_host else 0,
  }
  partial_sums = 4 * added_on_device if config.accumulation > 1 else 0
  returned = of_device
  if plan.transport(layout.model.num_stages) == "dma":
    returned += num_grads * of_host
  on_device = {
    "gradients": wire_bytes * returned // layout.num_shards,
    "partial_sums": partial_sums // layout.num_shards,
  }
  return on_host, on_device


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


def _stationary(layout: Layout, plan: Plan, config: TrainConfig) -> int:
  """Bytes of the working weights on the device.

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
  elems = {
    host: _elems([b for b in layout.buckets if b.on_device is not host])
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


def _flowing(layout: Layout, plan: Plan, config: TrainConfig) -> int:
  """Bytes of the weights of as many uses as the window has, at most.

  A use takes its units, and the leaves that are put together from them.
  """
  working = DTYPE_BYTES[config.working_dtype]
  arriving = WireDtypes.of(plan, config).weight_bytes
  last = layout.model.num_stages - 1
  by_stage = []
  for stage in range(last + 1):
    units = [u for b in layout.used_by(stage) for u in b.units]
    as_they_are = sum(
      unit.size
      for unit in units
      if arriving == working and _is_whole_leaf(layout, unit)
    )
    elems = sum(unit.size for unit in units)
    if layout.num_shards > 1:
      by_stage.append(arriving * elems // layout.num_shards)
      continue
    by_stage.append(arriving * elems + working * (elems - as_they_are))
  uses = [*range(last), *reversed(range(last + 1))]
  window = min(plan.flow_window, len(uses))
  around = uses + uses[:window]
  return max(
    sum(by_stage[stage] for stage in around[first : first + window])
    for first in range(len(uses))
  )


def _is_whole_leaf(layout: Layout, unit: WireUnit) -> bool:
  first = layout.model.leaves[unit.slices[0].leaf]
  return len(unit.slices) == 1 and unit.shape == first.shape


def _trained_on_host(layout: Layout) -> list[Bucket]:
  return [b for b in layout.buckets if b.trained and not b.on_device]


def _elems(buckets: Iterable[Bucket]) -> int:
  return sum(bucket.size for bucket in buckets)
