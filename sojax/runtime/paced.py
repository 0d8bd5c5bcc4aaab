"""The real runtime with an emulated device: overlap without a GPU.

Executor, threads, host updates, kernels, records, arenas and rings are those of
a Trainer. What the device and the link do takes the time that it is given, and
no core: there is no model, and gradients are noise that was made once. So what
is measured is the runtime's own overhead, and the overlap that it reaches.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from sojax.graph.graph import StepGraph, Task, TaskKind
from sojax.graph.timeline import Span, Timeline
from sojax.host.adam import HostBucket
from sojax.host.arena import Arena
from sojax.host.masters import by_shard
from sojax.host.speculation import make_host_buckets
from sojax.host.sums import GradientSums
from sojax.plan.adamw import AdamW, adam_scalars
from sojax.plan.buckets import Layout
from sojax.plan.casts import SeparateCasts
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Cost
from sojax.plan.plan import Plan, WireDtypes
from sojax.programs.validate import ScaleState
from sojax.runtime.adaptive import Speculator
from sojax.runtime.executor import TIMELINE_STEPS, Action, Executor, Wait
from sojax.runtime.pace import Pace, sleep_until
from sojax.runtime.paced_device import PacedDevice, PacedWeights
from sojax.runtime.parts import make_pool
from sojax.runtime.step import HostVerdict, Step
from sojax.runtime.updates import HostSums, HostUpdates

COMMIT = HostVerdict(grad_scale=1.0, finite=True, norm=0.0, loss_scale=1.0)
"""The verdict on a step that is neither clipped nor skipped."""

_NOISE_ELEMS = 1 << 20
_MASTER_SCALE = 0.02
_GRAD_NORM = 1e-2
"""Of all gradients together, so that no usual clip norm clips them."""


class PacedTrainer:
  """Takes training steps whose device only takes time.

  Attributes:
    layout: the model cut into buckets.
    graph: the tasks of a step.
    pool: runs the kernels.
    weights: where updates write new weights.
    sums: the sums of gradients, if micro-batches are added up on the host.
    host_buckets: masters and moments of the host buckets, by bucket index; to
      be read and written between steps only.
    gradients: what GradOut hands over, of each trained host bucket: the shards
      of each wire unit, in the dtype of the wire. Likewise.
    num_steps: steps begun.
  """

  def __init__(
    self,
    layout: Layout,
    plan: Plan,
    config: TrainConfig,
    graph: StepGraph,
    costs: Sequence[Cost],
    *,
    verdicts: Callable[[int], HostVerdict] = lambda step: COMMIT,
    seed: int = 0,
  ):
    """Takes the memory of the host's side, and starts the threads.

    Args:
      layout: the model cut into buckets, on one device.
      plan: how a step is carried out.
      config: what is trained.
      graph: the step graph of these (`sojax.graph.schedule`).
      costs: one for each task; those of the host take what they take.
      verdicts: the outcome of each step's Validate, by its number.
      seed: of masters and gradients.

    Raises:
      ValueError: if costs do not fit to the graph, or this machine has not the
        plan's cores or NUMA node.
      OSError: if the operating system does not grant memory, or the node.
    """
    self.layout, self.graph = layout, graph
    self.num_steps = 0
    self._pace = Pace(graph, costs, num_steps=TIMELINE_STEPS)
    # Of its own, so that nothing which tasks need refers to the trainer: its
    # memory is free when it is gone, without a garbage collection.
    self._verdicts = _Verdicts(self._pace, layout.model.groups, verdicts)
    self._speculator = Speculator(
      plan, config, num_stages=layout.model.num_stages
    )
    one = jnp.ones(())
    self._scale = ScaleState(one, one)
    self.pool = make_pool(plan)
    make_arena = functools.partial(
      Arena, numa_node=plan.numa_node, pool=self.pool
    )
    self.weights = PacedWeights(layout, plan, config)
    self.host_buckets = make_host_buckets(
      layout,
      plan,
      SeparateCasts.of(plan, config),
      make_arena,
      self.weights.copied,
    )
    noise = np.random.default_rng(seed).standard_normal(
      _NOISE_ELEMS, np.float32
    )
    _fill_masters(self.host_buckets, _MASTER_SCALE * noise)
    self.gradients = _make_gradients(
      layout, WireDtypes.of(plan, config).grad, make_arena, noise
    )
    self.sums = None
    if plan.accumulate == "host":
      self.sums = GradientSums(layout, make_arena)
    self._executor = Executor(graph, self._actions(config.accumulation))

  @property
  def count(self) -> int:
    """Optimizer steps committed."""
    return self._verdicts.count

  def set_costs(self, costs: Sequence[Cost]) -> None:
    """Says how long emulated tasks take from now on; no step may be under way.

    Args:
      costs: one for each task.

    Raises:
      ValueError: if they do not fit to the graph.
    """
    self._pace.set_costs(costs)

  def step(self) -> None:
    """Starts a step; returns when everything the caller issues is issued.

    Raises:
      StepError: if this step or an earlier one failed. There is no way on then.
    """
    self._executor.raise_if_failed()
    speculation = self._speculator.begin(self._executor.times)
    step = Step(self.num_steps, (), (), self._scale, speculation)
    self.num_steps += 1
    self._executor.run(step)

  def drain(self) -> None:
    """Waits until every step has ended.

    Raises:
      StepError: if one of them failed.
    """
    self._executor.drain()

  def timeline(self) -> Timeline:
    """Returns what ran when in the newest steps.

    Emulated tasks as they were planned, without the lateness of the thread that
    waits for them; those of the host as they were stamped.
    """
    spans = self._executor.timeline().spans
    planned = {
      step: self._pace.planned(step) for step in {span.step for span in spans}
    }

    def as_planned(span: Span) -> Span:
      assert span.task is not None
      if span.task not in planned[span.step]:
        return span
      start_s, end_s = planned[span.step][span.task]
      return dataclasses.replace(span, start_s=start_s, end_s=end_s)

    return Timeline(as_planned(span) for span in spans)

  def stamped_timeline(self) -> Timeline:
    """Returns what the waiting threads saw: tasks end as they noticed."""
    return self._executor.timeline()

  def close(self) -> None:
    """Ends the threads, after the work under way; may be called again."""
    self._executor.close()
    self.pool.close()

  def __enter__(self) -> "PacedTrainer":
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  def _actions(self, num_micro_batches: int) -> dict[TaskKind, Action]:
    updates = HostUpdates(
      self.host_buckets,
      self.weights,
      self.pool,
      unclipped=lambda step: COMMIT.grad_scale,
    )
    device = PacedDevice(
      self._pace,
      self.weights,
      self.gradients,
      of_micro_batches=self.sums is not None,
    )
    actions: dict[TaskKind, Action] = {
      TaskKind.HOST_SCALARS: self._verdicts.host_scalars,
      TaskKind.GRAD_OUT: device.grad_out,
      TaskKind.VALIDATE: self._verdicts.validate,
      TaskKind.HOST_UPDATE: updates.host_update,
      TaskKind.HOST_SETTLE: updates.host_settle,
      TaskKind.WEIGHT_IN: device.weight_in,
      TaskKind.WEIGHT_RESEND: device.weight_in,
    }
    for kind in (
      TaskKind.FORWARD,
      TaskKind.BACKWARD,
      TaskKind.DEVICE_UPDATE,
      TaskKind.ACTIVATION_OUT,
      TaskKind.ACTIVATION_IN,
    ):
      actions[kind] = device.pass_time
    if self.sums is not None:
      summing = HostSums(
        self.layout,
        self.sums,
        self.pool,
        num_micro_batches=num_micro_batches,
      )
      actions[TaskKind.HOST_ACCUMULATE] = summing.host_accumulate
    return actions


class _Verdicts:
  """What the device says of each step, and what follows from it on the host.

  Attributes:
    count: optimizer steps committed.
  """

  def __init__(
    self,
    pace: Pace,
    groups: Sequence[AdamW],
    verdicts: Callable[[int], HostVerdict],
  ):
    self.count = 0
    self._pace = pace
    self._groups = groups
    self._verdicts = verdicts

  def host_scalars(self, task: Task, step: Step) -> None:
    del task
    step.scalars = tuple(
      adam_scalars(group, self.count) for group in self._groups
    )

  def validate(self, task: Task, step: Step) -> Wait:
    end_s = self._pace.begin(task, step.number)

    def wait() -> None:
      sleep_until(end_s)
      verdict = self._verdicts(step.number)
      if verdict.finite:
        step.state_touched = True  # before the host thread sees the verdict
        self.count += 1
      step.host_verdict = verdict

    return wait


def _fill_masters(buckets: dict[int, HostBucket], noise: np.ndarray) -> None:
  for host in buckets.values():
    for number, unit in enumerate(host.bucket.units):
      host.write("master", number, 0, np.resize(noise, unit.size))


def _make_gradients(
  layout: Layout,
  dtype: str,
  make_arena: Callable[..., Arena],
  noise: np.ndarray,
) -> dict[int, list[list[np.ndarray]]]:
  buckets = layout.updated_by_host
  num_elems = max(1, sum(bucket.size for bucket in buckets))
  noise = (_GRAD_NORM / num_elems**0.5 * noise).astype(jnp.dtype(dtype))
  arena = make_arena(
    Arena.bytes_for(bucket.size * noise.itemsize for bucket in buckets)
  )
  gradients = {}
  for bucket in buckets:
    array = arena.empty(bucket.size, noise.dtype)
    array[:] = np.resize(noise, bucket.size)
    gradients[bucket.index] = by_shard(array, bucket, layout.num_shards)
  return gradients
