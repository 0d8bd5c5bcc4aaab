"""Seconds and bytes of what a step does, from a profile of the machine.

A device computes at max(FLOPs / reached rate, bytes / bandwidth). A bucket is
several transfers, one for each wire unit. An operation of the host moves its
bytes at the rate that the profile has for it and for the pool's threads.

Bytes that the host's operations read and write, for each parameter; g is the
gradient's (the wire's, or 4 of sums), w the working weight's on the wire, r the
record's:

    step                  12 + g  read   12 + w  written   (28: g = w = 2)
    step, split masters   12 + g         12                (26)
    record                12 + g         12 + w + r        (30, 31 if g = 2)
    copy ("pingpong")     12             12                and a step
    undo                  12 + g + r     12
    redo                  12 + g + r     12 + w
    accumulate             4 + g          4                (10)
    widen                  g              4                (6)
    narrow                 4              w                (6)
"""

import dataclasses
from collections.abc import Iterable, Mapping

from sojax.plan.buckets import Layout
from sojax.plan.casts import SeparateCasts
from sojax.plan.config import TrainConfig
from sojax.plan.hardware import Curve, HardwareProfile, Resource
from sojax.plan.plan import DTYPE_BYTES, Plan, WireDtypes
from sojax.plan.records import BYTES_PER_PARAM
from sojax.plan.residency import Residency
from sojax.plan.workload import StageWork, Workload

_STATE_BYTES = 12  # master, mu, nu

SETTLEMENTS = ("commit", "undo", "redo", "late")
"""What becomes of an update that was to run ahead: it counts, is taken back, is
taken again with the clip scale, or is the update, since it did not run ahead.
"""


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a task takes.

  Attributes:
    seconds: alone on the machine.
    uses: amounts of what it shares with tasks of other lanes: bytes of
      memories, core seconds of cores. A task that runs at full speed uses
      amount / seconds per second; where tasks want more together than there
      is, they slow each other down.
  """

  seconds: float
  uses: Mapping[Resource, float] = dataclasses.field(default_factory=dict)

  def __add__(self, other: "Cost") -> "Cost":
    """Returns the cost of one after the other."""
    uses = {
      resource: self.uses.get(resource, 0.0) + other.uses.get(resource, 0.0)
      for resource in (*self.uses, *other.uses)
    }
    return Cost(self.seconds + other.seconds, uses)


NOTHING = Cost(0.0)
"""The cost of what is not done."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSeconds:
  """Seconds of each stage's programs, as measured with a plan.

  Attributes:
    forward: by stage; that of the last stage, which has none, is not used.
    backward: by stage, with all that it computes again.
  """

  forward: tuple[float, ...]
  backward: tuple[float, ...]


def step_bytes(plan: Plan, config: TrainConfig) -> int:
  """Returns the bytes that a step moves for each parameter of a host bucket.

  >>> config = TrainConfig(micro_batch=1, seq_len=8, precision="bf16")
  >>> step_bytes(Plan(), config), step_bytes(Plan(master="split"), config)
  (28, 26)
  """
  wire = WireDtypes.of(plan, config)
  grads, weights = wire.grad_bytes, wire.weight_bytes
  casts = SeparateCasts.of(plan, config)
  if plan.accumulate == "host" or casts.widen:
    grads = 4
  if plan.master == "split" or casts.narrow:
    weights = 0
  return 2 * _STATE_BYTES + grads + weights


class Costs:
  """What the tasks of one rank cost on a machine."""

  def __init__(
    self,
    layout: Layout,
    plan: Plan,
    config: TrainConfig,
    workload: Workload,
    profile: HardwareProfile,
    *,
    stage_seconds: StageSeconds | None = None,
  ):
    """Remembers what it is asked about.

    Args:
      layout: the model cut into buckets.
      plan: how a step is carried out.
      config: what is trained.
      workload: what the model asks for.
      profile: the machine.
      stage_seconds: what stages take, if that was measured; else it follows
        from their FLOPs and bytes.

    Raises:
      ValueError: if the profile has no rate for the working dtype, or
        `stage_seconds` is of another number of stages.
    """
    num_stages = layout.model.num_stages
    if config.working_dtype not in profile.device_flops:
      raise ValueError(
        f"the profile {profile.name!r} has no FLOP/s of {config.working_dtype}"
        f" but of {sorted(profile.device_flops)}; add them, or train in another"
        " precision"
      )
    if stage_seconds is not None:
      for name in ("forward", "backward"):
        number = len(getattr(stage_seconds, name))
        if number != num_stages:
          raise ValueError(
            f"stage_seconds.{name} is of {number} stages, but the model has"
            f" {num_stages}; measure this model"
          )
    self._layout = layout
    self._plan = plan
    self._config = config
    self._workload = workload
    self._profile = profile
    self._measured = stage_seconds
    self._transfers: dict[tuple[tuple[int, ...], bool], Cost] = {}
    self._wire = WireDtypes.of(plan, config)
    self._working_bytes = DTYPE_BYTES[config.working_dtype]
    self._casts = SeparateCasts.of(plan, config)
    self._step_bytes = step_bytes(plan, config)
    self._policies = plan.activations_by_stage(num_stages)
    self._elems = [
      sum(bucket.size for bucket in layout.used_by(stage)) // layout.num_shards
      for stage in range(num_stages)
    ]
    self._residency = Residency.of(layout, plan)
    self._flowing_elems = [
      sum(b.size for b in self._residency.flowing_to(stage))
      // layout.num_shards
      for stage in range(num_stages)
    ]
    self._own_elems = [
      sum(bucket.size for bucket in layout.of_stage(stage) if bucket.trained)
      // layout.num_shards
      for stage in range(num_stages)
    ]

  def forward(self, stage: int, *, first_micro: bool = True) -> Cost:
    """Returns the cost of a stage's forward.

    Args:
      stage: which.
      first_micro: whether the micro-batch is the step's first, which puts new
        weights together.
    """
    work = self._workload.stages[stage]
    cast = self._weight_cast_bytes(stage, new=first_micro, fetched=True)
    measured = None if self._measured is None else self._measured.forward[stage]
    return self._compute(
      work.forward_flops, work.forward_bytes + cast, measured
    )

  def backward(self, stage: int, last_micro: bool) -> Cost:
    """Returns the cost of a stage's backward, and of what it does to gradients.

    Args:
      stage: which; the last one's backward is its forward, too.
      last_micro: whether gradients are complete then.
    """
    work = self._workload.stages[stage]
    last = stage == self._layout.model.num_stages - 1
    flops, num_bytes = work.backward_flops, work.backward_bytes
    if last:
      flops += work.forward_flops
      num_bytes += work.forward_bytes
    elif self._policies[stage] != "keep":
      flops += _recompute_flops(work)
      num_bytes += work.forward_bytes
    num_bytes += self._weight_cast_bytes(
      stage, new=last, fetched=not self._residency.stay(stage)
    )
    num_bytes += self._gradient_bytes(stage, last_micro)
    measured = (
      None if self._measured is None else self._measured.backward[stage]
    )
    return self._compute(flops, num_bytes, measured)

  def grad_out(self, bucket: int) -> Cost:
    """Returns the cost of a bucket's gradients on their way to the host."""
    return self._bucket_transfer(
      bucket, self._wire.grad_bytes, self._profile.d2h
    )

  def weight_in(self, bucket: int) -> Cost:
    """Returns the cost of a bucket's weights on their way to the device."""
    return self._bucket_transfer(
      bucket, self._wire.weight_bytes, self._profile.h2d
    )

  def activation(self, stage: int, *, out: bool) -> Cost:
    """Returns the cost of a move of a stage's input, to the host or back."""
    curve = self._profile.d2h if out else self._profile.h2d
    return self._transfer([self._workload.stages[stage].input_bytes], curve)

  def host_accumulate(self, bucket: int, *, first_micro: bool) -> Cost:
    """Returns the cost of adding a micro-batch's gradients to their sums."""
    grad = self._wire.grad_bytes
    if first_micro:
      return self._host("widen", bucket, 4 + grad)
    return self._host("accumulate", bucket, 8 + grad)

  def host_update(self, bucket: int, *, ahead: bool) -> Cost:
    """Returns the cost of a bucket's update.

    Args:
      bucket: which.
      ahead: whether it runs ahead of Validate and leaves what takes it back.
    """
    plan = self._plan
    if ahead and plan.speculation == "pingpong":
      copy = self._host("copy", bucket, 2 * _STATE_BYTES)
      return copy + self._host("step", bucket, self._step_bytes)
    if ahead:
      record = BYTES_PER_PARAM[plan.speculation]
      return self._host(f"record{record}", bucket, self._step_bytes + record)
    cost = self._host("step", bucket, self._step_bytes)
    if self._casts.widen:
      cost = self._host("widen", bucket, 4 + self._wire.grad_bytes) + cost
    if self._casts.narrow:
      cost += self._narrow(bucket)
    return cost

  def host_settle(self, bucket: int, settlement: str = "commit") -> Cost:
    """Returns the cost of settling an update that was to run ahead.

    Args:
      bucket: which.
      settlement: one of `SETTLEMENTS`.
    """
    assert settlement in SETTLEMENTS, settlement
    if settlement == "commit":
      return self._tiny()
    if settlement == "late":
      return self.host_update(bucket, ahead=False)
    again = settlement == "redo"
    if self._plan.speculation == "pingpong":
      # The arrays from before the step take their place again.
      if again:
        return self.host_update(bucket, ahead=False)
      return self._narrow(bucket)
    record = BYTES_PER_PARAM[self._plan.speculation]
    moved = self._step_bytes + record
    if again:
      return self._host("redo", bucket, moved)
    moved -= 0 if self._split else self._wire.weight_bytes
    undo = self._host("undo", bucket, moved)
    # The halves of split masters are the weights.
    return undo if self._split else undo + self._narrow(bucket)

  def device_update(self, bucket: int) -> Cost:
    """Returns the cost of an update on the device."""
    weights = self._working_bytes if self._working_bytes != 4 else 0
    num_bytes = 2 * _STATE_BYTES + self._wire.grad_bytes + weights
    return self._compute(0.0, num_bytes * self._elems_of(bucket), None)

  def validate(self) -> Cost:
    """Returns the cost of Validate: a program of a few scalars."""
    return self._tiny()

  def host_scalars(self) -> Cost:
    """Returns the cost of the schedules' evaluation."""
    return self._tiny()

  def all_gather(self, num_bytes: float) -> Cost:
    """Returns the cost of a ring that gathers `num_bytes` on every rank."""
    return self._ring(num_bytes)

  def reduce_scatter(self, num_bytes: float) -> Cost:
    """Returns the cost of a ring that adds up `num_bytes` of every rank."""
    return self._ring(num_bytes)

  @property
  def _split(self) -> bool:
    return self._plan.master == "split"

  def _narrow(self, bucket: int) -> Cost:
    return self._host("narrow", bucket, 4 + self._wire.weight_bytes)

  def _weight_cast_bytes(
    self, stage: int, *, new: bool, fetched: bool
  ) -> float:
    """Returns what the device moves to round the weights that have arrived.

    Args:
      stage: which.
      new: whether the use is the first in a step of those that stay.
      fetched: whether those that flow are fetched for it.
    """
    if self._wire.weight_bytes == self._working_bytes:
      return 0.0
    moved = self._wire.weight_bytes + self._working_bytes
    flowing = self._flowing_elems[stage]
    staying = self._elems[stage] - flowing
    return float(moved * (new * staying + fetched * flowing))

  def _gradient_bytes(self, stage: int, last_micro: bool) -> float:
    """Returns what backward moves when it has the gradients.

    They are added to the sums of the micro-batches before, read and written;
    and read once more, rounded, squared and written as they leave.
    """
    elems = self._own_elems[stage]
    on_host = self._plan.accumulate == "host"
    added_up = self._config.accumulation > 1 and not on_host
    moved = 8 if added_up else 0
    if last_micro or on_host:
      moved += self._working_bytes + self._wire.grad_bytes
    return float(moved * elems)

  def _compute(
    self, flops: float, num_bytes: float, measured: float | None
  ) -> Cost:
    """Returns the cost of a program of the device."""
    profile = self._profile
    seconds = num_bytes / profile.device_bandwidth
    if flops:
      peak = profile.device_flops[self._config.working_dtype]
      rate = peak * profile.efficiency.at(flops)
      seconds = max(seconds, flops / rate)
    if measured is not None:
      seconds = measured
    uses = {Resource.DEVICE_MEMORY: num_bytes}
    if profile.device_is_host:
      uses[Resource.HOST_MEMORY] = num_bytes
    return Cost(seconds, uses | self._cores(seconds * profile.host_cores))

  def _bucket_transfer(
    self, bucket: int, elem_bytes: int, curve: Curve
  ) -> Cost:
    layout = self._layout
    units = layout.buckets[bucket].units
    sizes = (*(u.size * elem_bytes // layout.num_shards for u in units),)
    key = sizes, curve is self._profile.d2h
    if key not in self._transfers:
      self._transfers[key] = self._transfer(sizes, curve)
    return self._transfers[key]

  def _transfer(self, sizes: Iterable[float], curve: Curve) -> Cost:
    """Returns the cost of several transfers, one after another.

    Where the device is the host, a core copies.
    """
    sizes = [size for size in sizes if size]
    total = float(sum(sizes))
    seconds = sum(size / curve.at(size) for size in sizes)
    uses = {Resource.HOST_MEMORY: total, Resource.DEVICE_MEMORY: total}
    return Cost(seconds, uses | self._cores(seconds))

  def _host(self, operation: str, bucket: int, bytes_per_elem: int) -> Cost:
    """Returns the cost of one pass over a bucket of this rank's host."""
    profile = self._profile
    threads = self._plan.pool_threads or profile.host_cores
    if self._plan.pool_cores is not None:
      threads = len(self._plan.pool_cores)
    threads = min(threads, profile.host_cores)
    num_bytes = float(bytes_per_elem * self._elems_of(bucket))
    seconds = num_bytes / profile.host_rates[operation].at(threads)
    core_seconds = seconds * threads + profile.host_task_s
    uses = {
      Resource.HOST_MEMORY: num_bytes,
      Resource.HOST_CORES: core_seconds,
    }
    return Cost(seconds, uses)

  def _tiny(self) -> Cost:
    """Returns the cost of a task that does next to nothing."""
    seconds = self._profile.dispatch_s
    return Cost(seconds, self._cores(0.0)) if seconds else NOTHING

  def _cores(self, core_seconds: float) -> dict[Resource, float]:
    """Returns what a task uses of the cores, with the runtime's part.

    Nothing where no program runs on them.
    """
    if not self._profile.device_is_host:
      return {}
    return {Resource.HOST_CORES: core_seconds + self._profile.host_task_s}

  def _ring(self, num_bytes: float) -> Cost:
    """Returns the cost of a collective: (n - 1) / n of it pass each link."""
    number = self._workload.num_ranks
    sent = (number - 1) / number * num_bytes
    profile = self._profile
    return Cost(
      sent / profile.network_bandwidth + profile.network_latency_s,
      {Resource.DEVICE_MEMORY: 2 * sent},
    )

  def _elems_of(self, bucket: int) -> int:
    return self._layout.buckets[bucket].size // self._layout.num_shards


def _recompute_flops(work: StageWork) -> float:
  if work.recompute_flops is None:
    return work.forward_flops
  return work.recompute_flops
