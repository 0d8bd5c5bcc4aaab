"""The data that the tasks of one step hand to each other."""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from sojax.host.wire import WireBuffer
from sojax.plan.adamw import AdamScalars
from sojax.plan.buckets import Bucket
from sojax.programs.keep import Left
from sojax.programs.spec import BackwardOut, Targets
from sojax.programs.validate import ScaleState, Verdict
from sojax.runtime.speculation import Speculation


@dataclasses.dataclass(frozen=True)
class MicroBatch:
  """A micro-batch on the device: int32 [B, T] inputs, and what to predict."""

  inputs: jax.Array
  targets: Targets


@dataclasses.dataclass(frozen=True)
class HostVerdict:
  """Validate's outcome as the host reads it: the bits of the device's."""

  grad_scale: float
  finite: bool
  norm: float
  loss_scale: float

  @property
  def clip_scale(self) -> float:
    """What clipping multiplies gradients by; 1 if it leaves them."""
    return self.grad_scale * self.loss_scale

  @property
  def clipped(self) -> bool:
    """Whether gradients were scaled down to the clip norm."""
    return self.finite and self.clip_scale < 1.0


@dataclasses.dataclass
class Step:
  """One step on its way through the graph. Each field is for its consumer.

  Attributes:
    number: counts calls of Trainer.step, from 0.
    batches: the micro-batches.
    other_before: each stage's other state before the step.
    scale: the loss scale of the step.
    speculation: its updates that run ahead of validation.
    other: the same as of the newest forward.
    other_into: each stage's other state as it went into the newest forward.
    inputs: input of each stage in the current micro-batch, on the device.
    offloaded: input of each stage in the current micro-batch, on the host.
    kept: what forward left for backward, of stages that keep activations.
    grad: gradient of the newest backward's input.
    newest_backward: what it returned, then only its sums of squares.
    tied: gradients from borrowers, by leaf, in the current micro-batch.
    partial: each stage's sums over micro-batches so far.
    units: gradient wire units on the device, by bucket.
    micro_grads: the same on the host, of one micro-batch, by bucket and number
      of the micro-batch, until they are added to the sums there: the shards of
      each unit.
    host_grads: complete gradients on the host, or their sums, by bucket:
      likewise.
    sumsqs: sums of squares, by stage.
    losses: one per micro-batch.
    fetched: buckets and units that flowed in, by the index of their task.
    params: parameters that flowed in for a forward and stay for its backward,
      by stage.
    wire: buffers that new weights were written into, by bucket.
    scalars: AdamW's scalars, by hyper-parameter group.
    verdict: Validate's outcome on the device.
    host_verdict: the same on the host.
    state_touched: whether the step may have begun to change the state for good.
    notes: what the timeline says of a task, by its index.
  """

  number: int
  batches: Sequence[MicroBatch]
  other_before: Sequence[tuple[jax.Array, ...]]
  scale: ScaleState
  speculation: Speculation = dataclasses.field(default_factory=Speculation)
  other: list[tuple[jax.Array, ...]] = dataclasses.field(init=False)
  other_into: dict[int, tuple[jax.Array, ...]] = dataclasses.field(
    default_factory=dict
  )
  inputs: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
  offloaded: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
  kept: dict[int, Left] = dataclasses.field(default_factory=dict)
  grad: jax.Array | None = None
  newest_backward: BackwardOut | jax.Array | None = None
  tied: dict[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
  partial: dict[int, tuple[jax.Array, ...]] = dataclasses.field(
    default_factory=dict
  )
  units: dict[int, tuple[jax.Array, ...]] = dataclasses.field(
    default_factory=dict
  )
  micro_grads: dict[tuple[int, int], list[list[np.ndarray]]] = (
    dataclasses.field(default_factory=dict)
  )
  host_grads: dict[int, list[list[np.ndarray]]] = dataclasses.field(
    default_factory=dict
  )
  sumsqs: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
  losses: list[jax.Array] = dataclasses.field(default_factory=list)
  fetched: dict[int, tuple[Bucket, list[jax.Array]]] = dataclasses.field(
    default_factory=dict
  )
  params: dict[int, tuple[jax.Array, ...]] = dataclasses.field(
    default_factory=dict
  )
  wire: dict[int, list[WireBuffer]] = dataclasses.field(default_factory=dict)
  scalars: tuple[AdamScalars, ...] = ()
  verdict: Verdict | None = None
  host_verdict: HostVerdict | None = None
  state_touched: bool = False
  notes: dict[int, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    self.other = list(self.other_before)

  def wait_for_backward(self) -> None:
    """Waits for the end of the newest backward, whether it fails or not.

    An interrupt may have left nobody who does, and it delivers to the host.
    """
    newest = self.newest_backward
    if isinstance(newest, BackwardOut):
      newest = newest.sumsq
    # What fails is a step that has failed already.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      jax.block_until_ready(newest)

  def release(self) -> None:
    """Drops the arrays that only tasks need.

    What stays are the losses, the outcome, and what a failed step is taken back
    to: `other_before` and `scale`.
    """
    self.batches = ()
    self.grad = self.newest_backward = None
    self.other.clear()
    for arrays in (
      self.other_into,
      self.inputs,
      self.offloaded,
      self.kept,
      self.tied,
      self.partial,
      self.units,
      self.micro_grads,
      self.host_grads,
      self.sumsqs,
      self.fetched,
      self.params,
      self.wire,
    ):
      arrays.clear()
