"""The step graph: tasks on lanes, and what each one waits for."""

import dataclasses
import enum


class Lane(enum.StrEnum):
  """A serial resource; it runs its tasks one after another."""

  DEVICE = "device"
  D2H = "d2h"
  H2D = "h2d"
  HOST = "host"


class TaskKind(enum.StrEnum):
  """What a task does."""

  FORWARD = "forward"
  BACKWARD = "backward"
  GRAD_OUT = "grad_out"
  HOST_ACCUMULATE = "host_accumulate"
  VALIDATE = "validate"
  HOST_UPDATE = "host_update"
  DEVICE_UPDATE = "device_update"
  WEIGHT_IN = "weight_in"
  ACTIVATION_OUT = "activation_out"
  ACTIVATION_IN = "activation_in"


_OF_MICRO_BATCHES = (
  TaskKind.FORWARD,
  TaskKind.BACKWARD,
  TaskKind.GRAD_OUT,
  TaskKind.HOST_ACCUMULATE,
  TaskKind.ACTIVATION_OUT,
  TaskKind.ACTIVATION_IN,
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
