"""Step graphs to simulate, and a simulator that is obviously right."""

import dataclasses
from typing import NamedTuple

import hypothesis
from hypothesis import strategies as st

from sojax.graph.graph import Lane, StepGraph, Task, TaskKind, waits_for_end
from sojax.graph.schedule import schedule
from sojax.plan.adamw import adamw
from sojax.plan.buckets import Layout, Leaf, ModelShape
from sojax.plan.config import TrainConfig
from sojax.plan.network import Needs
from sojax.plan.plan import WEIGHTS, Plan
from sojax.plan.workload import StageWork, Workload

_KINDS = {
  Lane.DEVICE: TaskKind.FORWARD,
  Lane.D2H: TaskKind.GRAD_OUT,
  Lane.H2D: TaskKind.WEIGHT_IN,
  Lane.HOST: TaskKind.HOST_UPDATE,
  Lane.NETWORK: TaskKind.ALL_GATHER,
}


def graph_of(*tasks):
  """A graph of tasks: each a lane, and its deps and prev_deps, if it has any.

  Each is of a kind that its lane runs.
  """
  return StepGraph(
    tuple(
      Task(
        index=index,
        kind=_KINDS[lane],
        lane=lane,
        stage=index,
        deps=tuple(edges[0]) if edges else (),
        prev_deps=tuple(edges[1]) if edges[1:] else (),
      )
      for index, (lane, *edges) in enumerate(tasks)
    )
  )


@st.composite
def random_graphs(draw, max_tasks=12):
  """Any tasks on any lanes, with any dependencies."""
  source = draw(st.randoms(use_true_random=False))
  num_tasks = source.randint(1, max_tasks)
  tasks = []
  for index in range(num_tasks):
    num_deps = source.randint(0, min(index, 3))
    deps = source.sample(range(index), num_deps)
    num_prev = source.randint(0, min(num_tasks, 2))
    prev = source.sample(range(num_tasks), num_prev)
    tasks.append((source.choice([*Lane]), sorted(deps), sorted(prev)))
  return graph_of(*tasks)


@st.composite
def plans(draw):
  """Plans that differ in all that shapes a schedule."""
  switches = {
    "weights": ("stationary", "flow", "flow_once"),
    "device_buckets": (0, 0, 2),
    "flow_window": (2, 3, 99),
    "ring_slots": (1, 2),
    "gradients_out": ("dma", "callback"),
    "activations": ("recompute", "keep", "offload"),
    "accumulate": ("device", "host"),
    "speculation": ("wait", "record2", "pingpong"),
    "max_record_bytes": (None, 1 << 17),
    "master": ("fp32", "split"),
    "park": ("host", "device"),
  }
  drawn = {
    name: draw(st.sampled_from(values)) for name, values in switches.items()
  }
  try:
    return Plan(bucket_bytes=1 << 16, **drawn)
  except ValueError:
    hypothesis.reject()


class Scheduled(NamedTuple):
  """A workload, how it is trained, and the schedule of that."""

  workload: Workload
  plan: Plan
  config: TrainConfig
  layout: Layout
  graph: StepGraph


def workload_of(num_blocks, num_ranks=1):
  """Embed, blocks and a head that borrows embed's table; all sizes differ."""
  names = ["embed", *(f"block_{i}" for i in range(num_blocks)), "head"]
  leaves = [
    Leaf(name=f"{name}.w", stage=i, shape=((1 + i % 3) << 14,), group=0)
    for i, name in enumerate(names)
  ]
  model = ModelShape(
    stage_names=tuple(names),
    leaves=tuple(leaves),
    borrowed=((),) * (num_blocks + 1) + ((0,),),
    groups=(adamw(1e-3),),
  )
  every = frozenset(range(len(leaves)))
  return Workload(
    model=model,
    backward_order=tuple(range(len(leaves))),
    stages=tuple(
      StageWork(
        input_bytes=100 + 7 * stage,
        kept_bytes=1000 + 11 * stage,
        forward_flops=1.0,
        backward_flops=1.0,
        forward_bytes=1.0,
        backward_bytes=1.0,
      )
      for stage in range(len(names))
    ),
    needs=tuple(Needs(every, every) for _ in names),
    num_ranks=num_ranks,
  )


def schedule_of(workload, plan, config):
  """Schedules a workload."""
  layout = workload.layout(plan, config)
  graph = schedule(layout, plan, config, workload.input_bytes)
  return Scheduled(workload, plan, config, layout, graph)


@st.composite
def scheduled(draw):
  """A small model on one or two ranks with any plan."""
  plan = draw(plans())
  config = TrainConfig(
    micro_batch=1,
    seq_len=8,
    accumulation=draw(st.integers(1, 3)),
    precision="bf16" if plan.master == "split" else "fp32",
  )
  num_blocks = draw(st.integers(max(plan.device_buckets - 1, 0), 4))
  workload = workload_of(num_blocks, draw(st.sampled_from([1, 2])))
  if draw(st.booleans()):
    stay = ["stationary"] * plan.device_buckets
    others = st.lists(
      st.sampled_from(WEIGHTS),
      min_size=num_blocks + 2 - len(stay),
      max_size=num_blocks + 2 - len(stay),
    )
    plan = dataclasses.replace(plan, weights=(*stay, *draw(others)))
  return schedule_of(workload, plan, config)


def issuers_of(graph):
  """Says of each task whether the host thread issues it."""
  return [graph.host_thread_issues(task) for task in graph.tasks]


def has_fixed_lane_order(graph):
  """Whether one thread alone issues the tasks of each lane."""
  sides = {}
  for task, by_host in zip(graph.tasks, issuers_of(graph), strict=True):
    sides.setdefault(task.lane, set()).add(by_host)
  return all(len(of_lane) == 1 for of_lane in sides.values())


class SlowSimulator:
  """Times of tasks without contention, by sweeps until nothing changes.

  Every time is the latest of what it waits for, as a formula of others. Only
  the order of a lane is found on the way: that of the issues.
  """

  def __init__(self, graph, seconds, dispatch_s, num_steps):
    self.graph = graph
    self.seconds = seconds
    self.dispatch_s = dispatch_s
    self.all = [(n, t) for n in range(num_steps) for t in graph.tasks]
    self.issued = {(n, t.index): 0 for n, t in self.all}
    self.end = dict(self.issued)
    self.start = dict(self.issued)
    by_host = graph.host_thread_issues
    self.thread_order = {
      side: [(n, t) for n, t in self.all if by_host(t) is side]
      for side in (False, True)
    }

  def run(self):
    for _ in range(10_000):
      before = dict(self.issued), dict(self.start)
      for side, order in self.thread_order.items():
        self._issue(side, order)
      self._run_lanes()
      if before == (self.issued, self.start):
        return self.start, self.end
    raise AssertionError("the sweeps do not come to rest")

  def issue_times(self):
    """Returns when tasks are issued if they end when `end` says."""
    for _ in range(3):  # the host thread's depend on the caller's, and back
      for side, order in self.thread_order.items():
        self._issue(side, order)
    return self.issued

  def _issue(self, by_host, order):
    free = 0
    for n, task in order:
      at = max([free, *self._ready(n, task)])
      if by_host:
        at = max(at, self._begun(n))
      if task.lane is Lane.HOST:
        free = max(at, self.end[n, task.index])
      else:
        free = at = at + self._dispatch_s(task)
      self.issued[n, task.index] = at

  def _dispatch_s(self, task):
    needed = task.lane is not Lane.NETWORK and self.seconds[task.index]
    return self.dispatch_s if needed else 0

  def _ready(self, n, task):
    for m, deps in ((n, task.deps), (n - 1, task.prev_deps)):
      for dep in deps if m >= 0 else ():
        ended = waits_for_end(task, self.graph.tasks[dep])
        yield (self.end if ended else self.issued)[m, dep]

  def _begun(self, n):
    """When the caller began a step: when it had issued all of those before."""
    return max(
      (self.issued[m, t.index] for m, t in self.thread_order[False] if m < n),
      default=0,
    )

  def _run_lanes(self):
    for lane in Lane:
      tasks = [(n, t) for n, t in self.all if t.lane is lane]
      tasks.sort(
        key=lambda x: (self.issued[x[0], x[1].index], x[0], x[1].index)
      )
      free = 0
      for n, task in tasks:
        ends = [self.end[n, dep] for dep in task.deps]
        ends += [self.end[n - 1, dep] for dep in task.prev_deps if n]
        key = n, task.index
        start = self.start[key] = max([self.issued[key], *ends])
        if self.seconds[task.index]:
          start = self.start[key] = max(start, free)
          free = start + self.seconds[task.index]
        self.end[key] = start + self.seconds[task.index]
