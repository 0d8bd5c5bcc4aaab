"""The facade: a model, an optimizer and a plan become a training loop."""

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sojax import checkpoint
from sojax.cluster.mesh import Placement
from sojax.graph.schedule import schedule
from sojax.graph.timeline import Timeline
from sojax.models.loss import Loss
from sojax.plan.account import make_account
from sojax.plan.adamw import Optimizer
from sojax.plan.buckets import plan_buckets
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan, WireDtypes
from sojax.programs.keep import make_keep_programs, trace_kept_bytes
from sojax.programs.needs import trace_needs
from sojax.programs.split_model import split_model
from sojax.programs.stages import make_stage_programs
from sojax.programs.trace import backward_order, trace_stages
from sojax.runtime.batches import Batches
from sojax.runtime.executor import Executor
from sojax.runtime.metrics import StepMetrics
from sojax.runtime.parts import Parts
from sojax.runtime.run import StepError
from sojax.runtime.step import Step


class Trainer:
  """Trains a model whose optimizer state lives on the host.

  Attributes:
    config: what is trained.
    plan: how a step is carried out.
    layout: the model cut into buckets.
    graph: the tasks of a step.
    account: bytes that the plan takes on host and device.
  """

  def __init__(
    self,
    model: nnx.Module,
    optimizer: Optimizer,
    config: TrainConfig,
    plan: str | Plan | Mapping[str, Any] = "auto",
    mesh: Mesh | None = None,
    trainable: Any = nnx.Param,
    loss: Loss | None = None,
  ):
    """Copies the model's parameters; the model itself is left as it is.

    Args:
      model: a Flax NNX module, called with int32 tokens [B, T]. With
        `stages()` (see `sojax.models.Stage`) it trains stage by stage, else as
        one. Initialise one that is larger than the device under
        jax.default_device of a CPU device.
      optimizer: from `sojax.adamw` or `sojax.partition`.
      config: batch, precision and clipping.
      plan: "auto", a Plan, or a mapping of its switches.
      mesh: None for the first device, or a mesh with the axes "data" and "seq"
        (of one device), of any axis type: every device takes micro_batch rows
        of a micro-batch, and owns its part of weights and optimizer state.
      trainable: nnx filter of the Params that are trained. All modules run in
        training mode (dropout, statistics), whether theirs are or not.
      loss: (what the model returns, targets [B, T], mask [B, T]) -> the sum of
        mask times loss, a float32 scalar. None takes the last stage's own
        `loss`, or next-token cross entropy of logits [B, T, vocabulary].

    Raises:
      ValueError: for anything that does not fit together; nothing has been
        started then.
    """
    if not isinstance(config, TrainConfig):
      raise ValueError(f"config is a {type(config).__name__}; use TrainConfig")
    self.config = config
    self.plan = Plan.of(plan)
    self._model = model
    self._placement = Placement.of(mesh)
    self._split = split_model(model, optimizer, trainable, loss)
    shapes = trace_stages(
      self._split, config.working_dtype, (config.micro_batch, config.seq_len)
    )
    self.layout = plan_buckets(
      self._split.shape,
      bucket_bytes=self.plan.bucket_bytes,
      elem_bytes=WireDtypes.of(self.plan, config).grad_bytes,
      device_buckets=self.plan.device_buckets,
      num_shards=self._placement.num_devices,
      backward_order=backward_order(self._split, shapes),
    )
    input_bytes = [shape.x.size * shape.x.dtype.itemsize for shape in shapes]
    self.graph = schedule(self.layout, self.plan, config, input_bytes)
    programs = make_stage_programs(
      self._split,
      self.layout,
      shapes,
      self.plan,
      config,
      self._placement,
    )
    keeping = make_keep_programs(programs, self.plan, self._placement)
    self.account = make_account(
      self.layout,
      self.plan,
      config,
      input_bytes,
      trace_kept_bytes(self._split, keeping, shapes),
      trace_needs(self._split, programs, shapes),
    )
    vocab_size = getattr(model, "vocab_size", None)
    self._batches = Batches(config, vocab_size, self._placement)
    self._start(
      Parts(
        self._split,
        self.layout,
        self.plan,
        config,
        programs,
        keeping,
        self._placement,
      )
    )

  def _start(self, parts: Parts) -> None:
    """Starts the threads that carry out the tasks."""
    self._parts = parts
    self._state = parts.state
    self._weights = parts.weights
    self._compute = parts.compute
    self._executor = Executor(
      self.graph,
      parts.actions(),
      interrupt=parts.gradients_out.interrupt,
      reset=parts.gradients_out.reset,
    )
    self._broken: StepError | None = None
    self._finalizer = weakref.finalize(self, self._executor.close)

  @property
  def count(self) -> int:
    """Optimizer steps committed; waits for the steps under way."""
    self.drain()
    return self._state.count

  @property
  def num_steps(self) -> int:
    """Steps taken, skipped ones included."""
    return self._state.num_steps

  def step(self, batch: Mapping[str, np.ndarray]) -> StepMetrics:
    """Starts a training step; returns when all device work is dispatched.

    With accumulate="host" that is when the last micro-batch has been added up,
    since the device's work waits for sums on the host.

    Args:
      batch: "tokens", int32 [accumulation * micro_batch * data ranks,
        seq_len + 1], and perhaps "loss_mask", float32 or bool [.., seq_len]:
        the weight of each predicted token. The arrays may be reused afterwards.

    Returns:
      The step's metrics, which wait when they are read.

    Raises:
      ValueError: if the batch has another form; nothing has changed then.
      StepError: if this step or an earlier one failed.
    """
    batches = self._batches.for_step(batch, self._state.scale.scale)
    with self._noting_failures():
      self._executor.raise_if_failed()
      state = self._state
      step = Step(state.num_steps, batches, tuple(state.other), state.scale)
      self._state.num_steps += 1
      run = self._executor.run(step)
    return StepMetrics(run, last_stage=self.layout.model.num_stages - 1)

  def evaluate(self, batch: Mapping[str, np.ndarray]) -> float:
    """Returns the loss of a batch without training; dropout is off.

    Args:
      batch: as for `step`, with any multiple of micro_batch * data ranks rows.

    Returns:
      The loss summed over unmasked tokens, divided by their number.

    Raises:
      ValueError: if the batch has another form.
      StepError: if an earlier step failed.
    """
    batches = self._batches.for_evaluation(batch)
    self.drain()
    losses = self._compute.evaluate(batches, self._state.other)
    return float(np.sum([np.asarray(loss) for loss in losses]))

  def drain(self) -> None:
    """Waits until every step has ended.

    Raises:
      StepError: if one of them failed.
    """
    with self._noting_failures():
      self._executor.drain()

  def save(
    self,
    directory: str | os.PathLike[str],
    user_state: Mapping[str, Any] | None = None,
    *,
    keep: int | None = None,
  ) -> Path:
    """Writes a checkpoint of everything that training depends on.

    Args:
      directory: where checkpoints are kept, each in a folder of its own.
      user_state: what else the caller wants back; JSON values.
      keep: see `sojax.checkpoint.save`; None to remove none.

    Returns:
      The checkpoint's folder.

    Raises:
      StepError: if an earlier step failed.
      ValueError: see `sojax.checkpoint.save`.
    """
    self.drain()
    return checkpoint.save(
      Path(directory),
      self._state,
      user_state=dict(user_state or {}),
      keep=keep,
    )

  def restore(self, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Continues from a checkpoint; also after a step that failed.

    Args:
      path: a checkpoint, or the directory whose newest complete one is taken.

    Returns:
      The `user_state` that was saved with it.

    Raises:
      ValueError: if it is damaged or of another model; nothing has changed
        then.
      FileNotFoundError: if there is none.
    """
    self._executor.settle()
    user_state = checkpoint.restore(Path(path), self._state)
    self._executor.forget_failure()
    self._weights.load(self._state.masters())
    self._broken = None
    return user_state

  def timeline(self) -> Timeline:
    """Returns what ran when in the newest steps."""
    return self._executor.timeline()

  def sync_model(self) -> Any:
    """Writes what was trained into the model; returns the model.

    Its Params get the masters, in their own dtypes and on their own devices;
    its other state gets the trainer's.
    """
    self.drain()
    for index, (leaf, param) in enumerate(
      zip(self._split.shape.leaves, self._split.params, strict=True)
    ):
      old = param.get_value()
      master = self._state.read(index, "master", 0, leaf.size)
      values = master.reshape(leaf.shape).astype(old.dtype)
      on_device = isinstance(old, jax.Array)
      param.set_value(
        jax.device_put(values, old.sharding) if on_device else values
      )
    self._split.write_other(self._state.other)
    return self._model

  def close(self) -> None:
    """Ends the threads, after the work under way; may be called again."""
    self._finalizer()
    self._parts.close()

  def __enter__(self) -> "Trainer":
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  @contextlib.contextmanager
  def _noting_failures(self) -> Iterator[None]:
    """Takes an intact failure back; remembers one that broke the state."""
    if self._broken is not None:
      raise self._broken
    try:
      yield
    except StepError as error:
      if error.intact:
        self._state.other = list(error.data.other_before)
        self._state.scale = error.data.scale
        self._state.num_steps = error.step
      else:
        self._broken = error
      raise
