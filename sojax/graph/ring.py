"""Puts the ring of pinned buffers into a step graph, to simulate its limits.

In weight-stationary without a working copy an update takes buffers for its new
weights from a ring, and the end of their transfer gives them back. The executor
leaves that to the update, which waits for them. Here it becomes edges:

    WeightIn(earlier bucket) -> HostUpdate(bucket)
"""

import collections
import dataclasses

from sojax.graph.graph import StepGraph, TaskKind
from sojax.plan.account import ring_counts
from sojax.plan.buckets import Layout
from sojax.plan.plan import Plan
from sojax.plan.residency import Residency


def with_ring(
  graph: StepGraph, layout: Layout, plan: Plan, *, ahead: bool = True
) -> StepGraph:
  """Returns a step graph whose updates wait for free buffers.

  Buffers of a shape are taken by the units of that shape in the order of the
  updates, and come back in the same order, since the link keeps it: a unit
  waits for the one that comes as many before it as there are buffers.

  Args:
    graph: the step graph.
    layout: the model cut into buckets.
    plan: how the step is carried out.
    ahead: whether updates run ahead of Validate where they can be taken back.
      If not, what settles them takes the buffers, and weights are sent again.

  Returns:
    The graph; the same one if there is no ring.
  """
  counts = ring_counts(layout, plan)
  if not counts:
    return graph
  residency = Residency.of(layout, plan)
  takers, givers = _takers_and_givers(graph, ahead)
  users: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
  for bucket in takers:
    if residency.is_copied(layout.buckets[bucket]):
      continue
    for unit in layout.buckets[bucket].units:
      users[unit.shape].append(bucket)
  tasks = list(graph.tasks)
  for shape, buckets in users.items():
    for place, bucket in enumerate(buckets):
      before = place - counts[shape]
      giver = givers[buckets[before]]  # below 0: of the step before
      field = "deps" if before >= 0 else "prev_deps"
      task = tasks[takers[bucket]]
      known = task.deps if before >= 0 else task.prev_deps
      if giver not in known:
        tasks[task.index] = dataclasses.replace(
          task, **{field: (*known, giver)}
        )
  return StepGraph(tuple(tasks))


def _takers_and_givers(
  graph: StepGraph, ahead: bool
) -> tuple[dict[int, int], dict[int, int]]:
  """Returns what takes each bucket's buffers, and what gives them back.

  By bucket, in the order of the takers.
  """
  kinds = {TaskKind.HOST_UPDATE: TaskKind.WEIGHT_IN}
  if not ahead:
    kinds[TaskKind.HOST_SETTLE] = TaskKind.WEIGHT_RESEND
  found: dict[TaskKind, dict[int, int]] = {}
  for task in graph.tasks:
    if task.bucket is not None:
      found.setdefault(task.kind, {})[task.bucket] = task.index
  takers: dict[int, int] = {}
  givers: dict[int, int] = {}
  for taker, giver in kinds.items():  # a later kind replaces an earlier one
    takers |= found.get(taker, {})
    givers |= found.get(giver, {})
  return dict(sorted(takers.items(), key=lambda x: x[1])), givers
