"""The step graph: tasks on lanes, and what each one waits for."""

import dataclasses
import enum


class Lane(enum.StrEnum):
  """A serial resource; it runs its tasks one after another."""

  DEVICE = "device"
  D2H = "d2h"
  H2D = "h2d"
  HOST = "host"
  NETWORK = "network"


class TaskKind(enum.StrEnum):
  """What a task does."""

  HOST_SCALARS = "host_scalars"
  FORWARD = "forward"
  BACKWARD = "backward"
  GRAD_OUT = "grad_out"
  HOST_ACCUMULATE = "host_accumulate"
  VALIDATE = "validate"
  HOST_UPDATE = "host_update"
  HOST_SETTLE = "host_settle"
  DEVICE_UPDATE = "device_update"
  WEIGHT_IN = "weight_in"
  WEIGHT_RESEND = "weight_resend"
  ACTIVATION_OUT = "activation_out"
  ACTIVATION_IN = "activation_in"
  ALL_GATHER = "all_gather"
  REDUCE_SCATTER = "reduce_scatter"


_OF_MICRO_BATCHES = (
  TaskKind.FORWARD,
  TaskKind.BACKWARD,
  TaskKind.GRAD_OUT,
  TaskKind.HOST_ACCUMULATE,
  TaskKind.ACTIVATION_OUT,
  TaskKind.ACTIVATION_IN,
  TaskKind.ALL_GATHER,
  TaskKind.REDUCE_SCATTER,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
  """One piece of work of a step.

  Attributes:
    index: its place in the schedule.
    kind: what it does.
    lane: the resource that runs it.
    stage: the stage it works on; None for Validate.
    bucket: the bucket it works on; None for whole stages.
    micro: the micro-batch it belongs to.
    deps: indices of the tasks of the same step that come before it.
    prev_deps: indices of the tasks of the previous step that come before it.
    bytes: bytes it moves over the link.
  """

  index: int
  kind: TaskKind
  lane: Lane
  stage: int | None = None
  bucket: int | None = None
  micro: int = 0
  deps: tuple[int, ...] = ()
  prev_deps: tuple[int, ...] = ()
  bytes: int = 0

  @property
  def name(self) -> str:
    """A short label, such as "backward stage=3 micro=0"."""
    parts = [str(self.kind)]
    for field in ("stage", "bucket"):
      value = getattr(self, field)
      if value is not None:
        parts.append(f"{field}={value}")
    if self.kind in _OF_MICRO_BATCHES:
      parts.append(f"micro={self.micro}")
    return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class StepGraph:
  """One step of the steady state: every step repeats the same graph.

  Attributes:
    tasks: in schedule order, which every lane follows.
  """

  tasks: tuple[Task, ...]

  def __post_init__(self):
    for place, task in enumerate(self.tasks):
      assert task.index == place, f"{task.name} stands at {place}"
      assert all(dep < place for dep in task.deps), f"{task.name} has a cycle"
      assert all(dep < len(self.tasks) for dep in task.prev_deps)

  def host_thread_issues(self, task: Task) -> bool:
    """Says whether the host thread issues a task, rather than the caller.

    It issues the work of the host, and transfers that wait for it: the caller
    would wait there until the next step is called.
    """
    return task.lane is Lane.HOST or (
      task.lane in (Lane.H2D, Lane.D2H)
      and any(self.tasks[dep].lane is Lane.HOST for dep in task.deps)
    )


def waits_for_end(task: Task, before: Task) -> bool:
  """Says whether a task is issued only when one that it depends on has ended.

  JAX itself orders what consumes the arrays of programs and of transfers to the
  device behind them: that is issued as soon as those are. Everything else waits
  for the end, and so does Validate, which needs the outcome of the one before
  on the host.
  """
  if task.kind is before.kind is TaskKind.VALIDATE:
    return True
  consumes_arrays = task.lane in (Lane.DEVICE, Lane.D2H, Lane.NETWORK)
  makes_arrays = before.lane in (Lane.DEVICE, Lane.H2D, Lane.NETWORK)
  return not (consumes_arrays and makes_arrays)
