"""What a step reports, read when it is needed."""

import numpy as np

from sojax.graph.graph import TaskKind
from sojax.runtime.run import StepRun
from sojax.runtime.speculation import Outcome, Speculation
from sojax.runtime.step import HostVerdict


class StepMetrics:
  """The outcome of one step. Reading a value waits for it.

  Every property raises StepError if the step failed.
  """

  def __init__(self, run: StepRun, last_stage: int):
    self._run = run
    self._last_stage = last_stage
    self._losses = tuple(run.step.losses)

  @property
  def step(self) -> int:
    """Number of the step, from 0."""
    return self._run.step.number

  @property
  def loss(self) -> float:
    """The loss: summed over unmasked tokens, divided by their number."""
    self._run.wait_done(
      lambda task: (
        task.kind is TaskKind.BACKWARD and task.stage == self._last_stage
      )
    )
    return float(np.sum([np.asarray(loss) for loss in self._losses]))

  @property
  def grad_norm(self) -> float:
    """The global gradient norm before clipping."""
    return self._verdict().norm

  @property
  def clipped(self) -> bool:
    """Whether gradients were scaled down to the clip norm."""
    return self._verdict().clipped

  @property
  def clip_scale(self) -> float:
    """What clipping multiplied the gradients by: min(1, clip norm / norm)."""
    return self._verdict().clip_scale

  @property
  def loss_scale(self) -> float:
    """What the loss of this step was multiplied by: 1 except in fp16."""
    return self._verdict().loss_scale

  @property
  def skipped(self) -> bool:
    """Whether a gradient was not finite, so that nothing was updated."""
    return not self._verdict().finite

  @property
  def speculation(self) -> str:
    """Why the step's updates ran ahead of its validation, or waited for it."""
    return self._run.step.speculation.reason

  @property
  def speculated(self) -> int:
    """Buckets that were updated ahead of validation. Waits for the step."""
    return len(self._speculation().ran)

  @property
  def committed(self) -> int:
    """Buckets whose update ran ahead and stayed. Waits for the step."""
    return self._num_of(Outcome.COMMITTED)

  @property
  def redone(self) -> int:
    """Buckets updated ahead and again with the clip scale. Waits likewise."""
    return self._num_of(Outcome.REDONE)

  @property
  def undone(self) -> int:
    """Buckets whose update ahead was taken back by a skip. Waits likewise."""
    return self._num_of(Outcome.UNDONE)

  @property
  def record_bytes(self) -> int:
    """Bytes that held what takes the updates back. Waits for the step."""
    return self._speculation().record_bytes

  @property
  def escapes(self) -> int:
    """Values that records held as they were. Waits for the step."""
    return self._speculation().num_escapes

  @property
  def exposed_host_s(self) -> float:
    """Seconds of the step's tasks when only the host was busy.

    Waits for the whole step, so that the next one cannot overlap with it if
    this is read before the next is begun.
    """
    self._run.wait_done()
    return self._run.timeline().exposed_host_s()

  def _speculation(self) -> Speculation:
    self._run.wait_done()
    return self._run.step.speculation

  def _num_of(self, outcome: Outcome) -> int:
    outcomes = self._speculation().outcomes.values()
    return sum(x is outcome for x in outcomes)

  def _verdict(self) -> HostVerdict:
    self._run.wait_done(lambda task: task.kind is TaskKind.VALIDATE)
    verdict = self._run.step.host_verdict
    assert verdict is not None
    return verdict
