"""Training systems to compare by simulation: a plan each, and what it lacks.

A system is a plan of sojax where that can say what it does. What differs beyond
a plan is data: how fast its host operations are, how its step graph is changed,
which share of the buckets it keeps on the device.
"""

import dataclasses
import heapq
from collections.abc import Callable, Mapping, Sequence

from experiments.paper.constants import Constants
from sojax.graph.graph import StepGraph, Task, TaskKind
from sojax.plan.buckets import Layout
from sojax.plan.plan import Plan

Transform = Callable[[StepGraph, Layout], StepGraph]
"""Changes the graph of a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """How a system trains.

  Attributes:
    name: what it is called.
    plans: as plans of sojax, best first: the first that fits is used. Their
      `device_buckets` come from `device_shares`, and their `bucket_bytes` are
      of each rank.
    device_shares: shares of the trained buckets, those that backward finishes
      last, that may have their state on the device; the fastest that fits.
    transforms: changes of the step graph.
    step_s_per_param: seconds of its Adam step for each parameter of a host with
      nothing else to do; None takes the profile's.
    cast_bytes_per_s: of casts on the host in a pass of their own; None takes
      the profile's.
    free_records: whether what takes updates back costs neither time nor memory.
    recomputes_all: whether recomputation runs all of forward, as PyTorch's
      does, or leaves out what backward does not need, as XLA does.
    overlaps_collectives: whether collectives run beside programs, or are parts
      of them.
  """

  name: str
  plans: tuple[Plan, ...]
  device_shares: tuple[float, ...] = (0.0,)
  transforms: tuple[Transform, ...] = ()
  step_s_per_param: float | None = None
  cast_bytes_per_s: float | None = None
  free_records: bool = False
  recomputes_all: bool = True
  overlaps_collectives: bool = True


def weights_at_the_end(graph: StepGraph, layout: Layout) -> StepGraph:
  """Sends new weights when the last update has ended."""
  del layout
  updates = [t.index for t in graph.tasks if t.kind is TaskKind.HOST_UPDATE]
  sent = [task.index for task in graph.tasks if _is_sent(graph, task)]
  return _with_deps(graph, dict.fromkeys(sent, updates))


def _is_sent(graph: StepGraph, task: Task) -> bool:
  """Says whether a task sends what has been updated, for no use of its own."""
  return task.kind is TaskKind.WEIGHT_IN and any(
    graph.tasks[dep].kind is TaskKind.HOST_UPDATE for dep in task.deps
  )


@dataclasses.dataclass(frozen=True)
class InGroups:
  """Updates buckets in groups, as systems do whose buckets are larger.

  A group's updates begin when all of its gradients have arrived, and its
  weights leave when all of them are done.

  Attributes:
    num_elems: most parameters of a group, of each rank.
  """

  num_elems: float

  def __call__(self, graph: StepGraph, layout: Layout) -> StepGraph:
    """Adds the dependencies within each group."""
    group = _groups(layout, self.num_elems)
    grads = _of_groups(graph, group, TaskKind.GRAD_OUT)
    updates = _of_groups(graph, group, TaskKind.HOST_UPDATE)
    more = {}
    for task in graph.tasks:
      if task.kind is TaskKind.HOST_UPDATE:
        more[task.index] = grads[group[task.bucket]]
      if _is_sent(graph, task):
        more[task.index] = updates[group[task.bucket]]
    return _with_deps(graph, more)


def _of_groups(
  graph: StepGraph, group: Mapping[int | None, int], kind: TaskKind
) -> dict[int, list[int]]:
  """Returns the tasks of a kind by the group of their bucket."""
  found: dict[int, list[int]] = {}
  for task in graph.tasks:
    if task.kind is kind:
      found.setdefault(group[task.bucket], []).append(task.index)
  return found


def _groups(layout: Layout, num_elems: float) -> dict[int | None, int]:
  """Numbers the groups that host buckets, in their order, fill one by one."""
  group, filled, number = {}, 0, 0
  for bucket in layout.updated_by_host:
    if filled + bucket.size > num_elems * layout.num_shards:
      number, filled = number + 1, 0
    group[bucket.index] = number
    filled += bucket.size
  return group


def _with_deps(
  graph: StepGraph, more: Mapping[int, Sequence[int]]
) -> StepGraph:
  """Adds dependencies, and orders tasks anew, close to the order they have."""
  deps = [{*task.deps, *more.get(task.index, ())} for task in graph.tasks]
  users: list[list[int]] = [[] for _ in deps]
  for index, of_task in enumerate(deps):
    for dep in of_task:
      users[dep].append(index)
  waits = [len(of_task) for of_task in deps]
  ready = [index for index, count in enumerate(waits) if not count]
  order: list[int] = []
  while ready:
    order.append(heapq.heappop(ready))
    for user in users[order[-1]]:
      waits[user] -= 1
      if not waits[user]:
        heapq.heappush(ready, user)
  new = {old: number for number, old in enumerate(order)}
  return StepGraph(
    tuple(
      dataclasses.replace(
        graph.tasks[old],
        index=number,
        deps=tuple(sorted(new[dep] for dep in deps[old])),
        prev_deps=tuple(new[dep] for dep in graph.tasks[old].prev_deps),
      )
      for number, old in enumerate(order)
    )
  )


_WAITING = Plan(speculation="wait")
_APART = dataclasses.replace(
  _WAITING, grad_cast="host_separate", weight_cast="host_separate"
)
_CAST_ON_DEVICE = dataclasses.replace(
  _WAITING, grad_cast="device", weight_cast="device"
)
_AHEAD = {"speculation": "record3", "speculate": "always"}
_STREAMING = {"grad_window": 4}
DEVICE_SHARES = (0.0, 0.02, 0.05, 0.1, 0.15)


def ablation(constants: Constants) -> tuple[System, ...]:
  """Returns ZeRO-Offload and the paper's four steps to SuperOffload.

  ZeRO-Offload casts on the host in passes of their own, waits for the norm,
  and sends weights after the last update.
  """
  groups = InGroups(constants.group_elems)
  waiting = groups, weights_at_the_end
  grace = constants.grace_s_per_param
  zero_offload = System(
    name="ZeRO-Offload",
    plans=_with_streaming(_APART),
    transforms=waiting,
    step_s_per_param=constants.deepspeed_s_per_param,
    cast_bytes_per_s=constants.cast_bytes_per_s,
  )
  faster = dataclasses.replace(
    zero_offload, name="GraceAdam", step_s_per_param=grace
  )
  casting = dataclasses.replace(
    faster,
    name="superchip-aware casting",
    plans=_with_streaming(_CAST_ON_DEVICE),
  )
  ahead = dataclasses.replace(
    casting,
    name="speculation, then validation",
    plans=_with_streaming(dataclasses.replace(_CAST_ON_DEVICE, **_AHEAD)),
    transforms=(groups,),
    free_records=True,
  )
  repartitioned = dataclasses.replace(
    ahead, name="bucket repartitioning", device_shares=DEVICE_SHARES
  )
  return zero_offload, faster, casting, ahead, repartitioned


def all_on_device() -> System:
  """Returns what offloads nothing: DDP on one device, ZeRO-3 on several."""
  return System(name="all on device", plans=(_WAITING,), device_shares=(1.0,))


def zero_offload(constants: Constants) -> System:
  """Returns ZeRO-Offload."""
  return ablation(constants)[0]


def fsdp_offload(constants: Constants) -> System:
  """Returns what streams weights in, waits, and updates with PyTorch's Adam."""
  return System(
    name="FSDP-offload-like",
    plans=(dataclasses.replace(_WAITING, weights="flow", **_STREAMING),),
    step_s_per_param=constants.torch_s_per_param,
  )


def superoffload(constants: Constants) -> System:
  """Returns SuperOffload as published.

  Larger models cast on the host inside the update, then stream weights in and
  offload stage inputs as well.
  """
  system = ablation(constants)[-1]
  casting_on_host = dataclasses.replace(_WAITING, **_AHEAD, **_STREAMING)
  return dataclasses.replace(
    system,
    name="SuperOffload",
    plans=(*system.plans, casting_on_host, *_flowing(casting_on_host)),
  )


def sojax() -> System:
  """Returns sojax: exact records, buckets of 64 MiB, the profile's rates."""
  best = dataclasses.replace(_WAITING, **_AHEAD)
  streaming = dataclasses.replace(best, **_STREAMING)
  smaller = dataclasses.replace(
    streaming, speculation="record2", escape_bytes_per_param=0.25
  )
  return System(
    name="sojax",
    plans=(best, streaming, smaller, *_flowing(smaller)),
    device_shares=DEVICE_SHARES,
    recomputes_all=False,
    overlaps_collectives=False,
  )


def _with_streaming(plan: Plan) -> tuple[Plan, ...]:
  """Returns a plan, and one that has few gradients on the device at once."""
  return plan, dataclasses.replace(plan, **_STREAMING)


def _flowing(plan: Plan) -> tuple[Plan, ...]:
  flowing = dataclasses.replace(plan, weights="flow")
  return flowing, dataclasses.replace(flowing, activations="offload")
