"""Memory over time: what a timeline's tasks allocate and free.

The plan's account says what each purpose takes at most. Gradients, records,
stage inputs, residuals and weights that flow come and go with tasks; the rest
is there all the time and is the base. Where only some stages' weights flow, the
others are the least that there is of weights.
"""

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sojax.graph.graph import StepGraph, Task, TaskKind
from sojax.graph.timeline import Timeline
from sojax.plan.account import (
  PINNED,
  Account,
  flowing_bytes,
  make_account,
  staying_bytes,
)
from sojax.plan.buckets import Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan, WireDtypes
from sojax.plan.records import record_bytes
from sojax.plan.residency import Residency
from sojax.plan.workload import Workload


class Space(enum.StrEnum):
  """Where memory is: on one device, or on the host, for all its devices."""

  DEVICE = "device"
  PINNED = "pinned"
  ARENA = "arena"


Purpose = tuple[Space, str]
"""A space, and what is in it: a key of the account."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetime:
  """Bytes that some tasks of a step need.

  Attributes:
    purpose: what they are for.
    bytes: how many.
    first: the task that allocates them.
    from_end: whether at its end; else at its start.
    last: the tasks that need them; they are free when all have ended.
  """

  purpose: Purpose
  bytes: int
  first: int
  from_end: bool
  last: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Level:
  """Bytes over time: `bytes[i]` from `times_s[i]` on.

  Attributes:
    times_s: when they change, increasing.
    bytes: how many there are from then on.
  """

  times_s: tuple[float, ...]
  bytes: tuple[int, ...]

  @property
  def peak(self) -> int:
    """The most bytes at any time."""
    return max(self.bytes, default=0)


@dataclasses.dataclass(frozen=True)
class Memory:
  """What a timeline's steps have in memory.

  Attributes:
    base: bytes that are there all the time, by purpose.
    levels: bytes that come and go, by purpose, and what stays for the same.
    totals: all bytes over time, the base included, by space.
  """

  base: Mapping[Purpose, int]
  levels: Mapping[Purpose, Level]
  totals: Mapping[Space, Level]

  def table(self) -> str:
    """Returns the peaks as text, in MiB: by purpose, then by space.

    The purposes of a space need not reach their peaks at the same time.
    """
    peaks = {purpose: level.peak for purpose, level in self.levels.items()}
    rows = [
      (f"{space} {name}", nbytes)
      for (space, name), nbytes in sorted({**self.base, **peaks}.items())
    ]
    rows += [
      (f"{space} peak", level.peak) for space, level in self.totals.items()
    ]
    return "\n".join(f"{name:26}{n / 2**20:12.1f} MiB" for name, n in rows)


def memory_over_time(
  timeline: Timeline,
  graph: StepGraph,
  workload: Workload,
  plan: Plan,
  config: TrainConfig,
) -> Memory:
  """Follows what a timeline's tasks allocate and free.

  What is needed beyond the end of the timeline stays until then. A program's
  results are counted from its end: before that they are the program's, as are
  its temporaries, which are not counted. A stage's input is one, but counts
  from its start.

  Args:
    timeline: whole steps, simulated or measured; its spans name their tasks.
    graph: the graph of these steps.
    workload: the model and the batch.
    plan: how a step is carried out.
    config: what is trained.

  Raises:
    ValueError: if the plan's weights or activations are those of another number
      of stages, or weights of device buckets flow.
  """
  layout = workload.layout(plan, config)
  policies = plan.activations_by_stage(layout.model.num_stages)
  kept_bytes = {
    stage: workload.stages[stage].kept_bytes
    for stage, policy in enumerate(policies)
    if policy == "keep"
  }
  account = make_account(
    layout, plan, config, workload.input_bytes, kept_bytes, workload.needs
  )
  lifetimes = [
    *_of_gradients(graph, layout, plan, config),
    *_of_weights(graph, layout, plan, config),
    *_of_records(graph, layout, plan),
    *_of_activations(graph, layout, policies, workload.input_bytes, kept_bytes),
  ]
  staying = {(Space.DEVICE, "weights"): staying_bytes(layout, plan, config)}
  return _follow(timeline, lifetimes, account, staying)


def _by_bucket(graph: StepGraph, kind: TaskKind) -> dict[tuple[int, int], Task]:
  """Returns the tasks of a kind by bucket and micro-batch."""
  return {
    (task.bucket, task.micro): task
    for task in graph.tasks
    if task.kind is kind and task.bucket is not None
  }


def _by_stage(graph: StepGraph, kind: TaskKind) -> dict[tuple[int, int], int]:
  """Returns the indices of tasks of a kind by stage and micro-batch."""
  return {
    (task.stage, task.micro): task.index
    for task in graph.tasks
    if task.kind is kind and task.stage is not None
  }


def _of_gradients(
  graph: StepGraph, layout: Layout, plan: Plan, config: TrainConfig
) -> Iterator[Lifetime]:
  """Yields those of gradients, on the device and on the host.

  On the device they wait for their way out, or for the update there; on the
  host for the sum, or the update, or what settles it.
  """
  wire_bytes = WireDtypes.of(plan, config).grad_bytes
  backwards = _by_stage(graph, TaskKind.BACKWARD)
  leaving = _by_bucket(graph, TaskKind.GRAD_OUT)
  ends = {
    **_by_bucket(graph, TaskKind.HOST_UPDATE),
    **_by_bucket(graph, TaskKind.HOST_SETTLE),
  }
  sums = _by_bucket(graph, TaskKind.HOST_ACCUMULATE)
  delivered = plan.transport(layout.model.num_stages) != "dma"
  for (index, micro), out in leaving.items():
    bucket = layout.buckets[index]
    end = sums.get((index, micro)) or ends[index, 0]
    nbytes = wire_bytes * bucket.size
    yield Lifetime(
      (Space.PINNED, "gradients"), nbytes, out.index, False, (end.index,)
    )
    if not delivered:
      yield Lifetime(
        (Space.DEVICE, "gradients"),
        nbytes // layout.num_shards,
        backwards[bucket.stage, micro],
        True,
        (out.index,),
      )
  last_micro = config.accumulation - 1
  for (index, _), update in _by_bucket(graph, TaskKind.DEVICE_UPDATE).items():
    bucket = layout.buckets[index]
    yield Lifetime(
      (Space.DEVICE, "gradients"),
      wire_bytes * bucket.size // layout.num_shards,
      backwards[bucket.stage, last_micro],
      True,
      (update.index,),
    )


def _of_weights(
  graph: StepGraph, layout: Layout, plan: Plan, config: TrainConfig
) -> Iterator[Lifetime]:
  """Yields those of weights that flow in, for one use or for two."""
  residency = Residency.of(layout, plan)
  backwards = _by_stage(graph, TaskKind.BACKWARD)
  fetches = {t.index: t for t in graph.tasks if t.kind is TaskKind.WEIGHT_IN}
  purpose = Space.DEVICE, "weights"
  for use in graph.tasks:
    if use.kind not in (TaskKind.FORWARD, TaskKind.BACKWARD):
      continue
    assert use.stage is not None
    stay = residency.stay(use.stage)
    last = backwards[use.stage, use.micro] if stay else use.index
    for dep in use.deps:
      if dep in fetches:
        bucket = layout.buckets[fetches[dep].bucket or 0]
        found = flowing_bytes(layout, plan, config, bucket)
        yield Lifetime(purpose, found.whole, dep, False, (last,))
        if found.packed:
          yield Lifetime(purpose, found.packed, dep, False, (use.index,))
          yield Lifetime(purpose, found.unpacked, use.index, False, (last,))


def _of_records(
  graph: StepGraph, layout: Layout, plan: Plan
) -> Iterator[Lifetime]:
  """Yields those of what takes updates back."""
  updates = _by_bucket(graph, TaskKind.HOST_UPDATE)
  for key, settle in _by_bucket(graph, TaskKind.HOST_SETTLE).items():
    bucket = layout.buckets[key[0]]
    yield Lifetime(
      (Space.ARENA, "records"),
      record_bytes(bucket, plan, layout.num_shards).total,
      updates[key].index,
      False,
      (settle.index,),
    )


def _of_activations(
  graph: StepGraph,
  layout: Layout,
  policies: Sequence[str],
  input_bytes: Sequence[int],
  kept_bytes: Mapping[int, int],
) -> Iterator[Lifetime]:
  """Yields those of stage inputs and of what forward leaves for backward."""
  forwards = _by_stage(graph, TaskKind.FORWARD)
  leaving = _by_stage(graph, TaskKind.ACTIVATION_OUT)
  coming = _by_stage(graph, TaskKind.ACTIVATION_IN)
  on_device = Space.DEVICE, "stage_inputs"
  for (stage, micro), backward in _by_stage(graph, TaskKind.BACKWARD).items():
    key = stage, micro
    maker = forwards.get((max(stage - 1, 0), micro), backward)
    nbytes = input_bytes[stage]
    if policies[stage] == "offload":
      out, back = leaving[key], coming[key]
      yield Lifetime(on_device, nbytes, maker, False, (out, forwards[key]))
      yield Lifetime(on_device, nbytes, back, False, (backward,))
      on_host = layout.num_shards * nbytes
      purpose = Space.PINNED, "stage_inputs"
      yield Lifetime(purpose, on_host, out, False, (back,))
    else:
      yield Lifetime(on_device, nbytes, maker, False, (backward,))
    if stage in kept_bytes:
      purpose = Space.DEVICE, "residuals"
      kept = kept_bytes[stage]
      yield Lifetime(purpose, kept, forwards[key], True, (backward,))


def _follow(
  timeline: Timeline,
  lifetimes: Sequence[Lifetime],
  account: Account,
  staying: Mapping[Purpose, int],
) -> Memory:
  """Sums up lifetimes, with the times that a timeline gives their tasks.

  What stays is counted with what comes and goes for the same purpose, if
  anything does.
  """
  changes: dict[Purpose, list[tuple[float, int]]] = {
    life.purpose: [] for life in lifetimes
  }
  for life, start_s, end_s in _timed(timeline, lifetimes):
    changes[life.purpose] += [(start_s, life.bytes), (end_s, -life.bytes)]
  base = {
    purpose: nbytes
    for purpose, nbytes in _purposes(account).items()
    if purpose not in changes
  }
  least = {p: nbytes for p, nbytes in staying.items() if p in changes}
  totals = {
    space: _level(
      (
        x
        for (where, _), found in changes.items()
        if where == space
        for x in found
      ),
      sum(
        nbytes
        for purpose, nbytes in {**least, **base}.items()
        if purpose[0] == space
      ),
      timeline.window[0],
    )
    for space in Space
  }
  levels = {
    purpose: _level(found, least.get(purpose, 0), timeline.window[0])
    for purpose, found in changes.items()
  }
  return Memory(base, levels, totals)


def _timed(
  timeline: Timeline, lifetimes: Sequence[Lifetime]
) -> Iterator[tuple[Lifetime, float, float]]:
  """Yields every lifetime of every step, with its start and its end."""
  spans = {(span.step, span.task): span for span in timeline.spans}
  for step in sorted({span.step for span in timeline.spans}):
    for life in lifetimes:
      first = spans.get((step, life.first))
      if first is None:
        continue
      last = [spans.get((step, task)) for task in life.last]
      ends_s = [timeline.window[1] if x is None else x.end_s for x in last]
      yield life, first.end_s if life.from_end else first.start_s, max(ends_s)


def _purposes(account: Account) -> dict[Purpose, int]:
  on_host = {
    (Space.PINNED if name in PINNED else Space.ARENA, name): nbytes
    for name, nbytes in account.host.items()
  }
  on_device = {(Space.DEVICE, name): n for name, n in account.device.items()}
  return {**on_host, **on_device}


def _level(
  changes: Iterable[tuple[float, int]], base: int, start_s: float
) -> Level:
  """Adds up changes; what is freed at a time can be allocated then."""
  by_time = {start_s: base}
  for time_s, change in changes:
    by_time[time_s] = by_time.get(time_s, 0) + change
  times_s = sorted(by_time)
  levels = itertools.accumulate(by_time[time_s] for time_s in times_s)
  return Level(tuple(times_s), tuple(levels))
