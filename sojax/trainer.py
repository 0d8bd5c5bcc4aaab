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
from sojax.auto import auto_plan
from sojax.cluster.mesh import pinned_limit_bytes
from sojax.graph.timeline import Timeline
from sojax.models.loss import Loss
from sojax.plan.adamw import Optimizer
from sojax.plan.config import TrainConfig
from sojax.plan.pinned import (
  DEFAULT_PINNED_LIMIT_BYTES,
  PINNED_LIMIT,
  check_pinned_limit,
)
from sojax.plan.plan import Plan
from sojax.runtime.batches import Batches
from sojax.runtime.metrics import StepMetrics
from sojax.runtime.run import StepError
from sojax.runtime.setup import Setup, make_setup
from sojax.runtime.stepper import Stepper

_DEFAULT_PLAN = Plan()


class Trainer:
  """Trains a model whose optimizer state lives on the host.

  Attributes:
    config: what is trained.
    plan: how a step is carried out.
    layout: the model cut into buckets.
    graph: the tasks of a step.
    account: bytes that the plan takes on host and device.
    auto: if the plan was chosen here, why, and the step to expect; else None.
  """

  def __init__(
    self,
    model: nnx.Module,
    optimizer: Optimizer,
    config: TrainConfig,
    plan: str | Plan | Mapping[str, Any] = _DEFAULT_PLAN,
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
      plan: a Plan, a mapping of its switches, or "auto", which measures machine
        and model, once, and takes the plan with the shortest predicted step.
      mesh: None for the first device, or a mesh with the axes "data" and "seq"
        (of one device), of any axis type: every device takes micro_batch rows
        of a micro-batch, and owns its part of weights and optimizer state.
      trainable: nnx filter of the Params that are trained. All modules run in
        training mode (dropout, statistics), whether theirs are or not.
      loss: (what the model returns, targets [B, T], mask [B, T]) -> the sum of
        mask times loss, a float32 scalar. None takes the last stage's own
        `loss`, or next-token cross entropy of logits [B, T, vocabulary].

    Raises:
      ValueError: for what does not fit together; nothing is started then.
    """
    if not isinstance(config, TrainConfig):
      raise ValueError(f"config is a {type(config).__name__}; use TrainConfig")

    def take_apart(plan: Plan) -> Setup:
      return make_setup(model, optimizer, config, plan, mesh, trainable, loss)

    self.auto = auto_plan(take_apart) if plan == "auto" else None
    setup = take_apart(self.auto.plan if self.auto else Plan.of(plan))
    limit_bytes = pinned_limit_bytes(
      setup.placement.platform, PINNED_LIMIT, DEFAULT_PINNED_LIMIT_BYTES
    )
    check_pinned_limit(setup.account, limit_bytes)
    self.config, self.plan = config, setup.plan
    self.layout, self.graph = setup.layout, setup.graph
    self.account = setup.account
    self._model = model
    self._setup = setup
    vocab_size = getattr(model, "vocab_size", None)
    self._batches = Batches(config, vocab_size, setup.placement)
    self._stepper = Stepper(setup)
    self._parts = self._stepper.parts
    self._executor = self._stepper.executor
    self._state = self._parts.state
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

    With accumulate="host" that is when the last micro-batch has been added up.

    Args:
      batch: "tokens", int32 [accumulation * micro_batch * data ranks,
        seq_len + 1], perhaps "loss_mask", float32 or bool [.., seq_len]: each
        predicted token's weight. The arrays may be reused afterwards.

    Returns:
      The step's metrics, which wait when they are read.

    Raises:
      ValueError: if the batch has another form; nothing has changed then.
      StepError: if this step or an earlier one failed.
    """
    batches = self._batches.for_step(batch, self._state.scale.scale)
    with self._noting_failures():
      run = self._stepper.step(batches)
    return StepMetrics(run, last_stage=self.layout.model.num_stages - 1)

  def evaluate(self, batch: Mapping[str, np.ndarray]) -> float:
    """Returns the loss of a batch without training; dropout is off.

    Args:
      batch: as for `step`, of any multiple of micro_batch * data ranks rows.

    Returns:
      The loss summed over unmasked tokens, divided by their number.

    Raises:
      ValueError: if the batch has another form.
      StepError: if an earlier step failed.
    """
    batches = self._batches.for_evaluation(batch)
    self.drain()
    losses = self._parts.compute.evaluate(batches, self._state.other)
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
    self._parts.take_over_state()
    self._broken = None
    return user_state

  def timeline(self) -> Timeline:
    """Returns what ran when in the newest steps."""
    return self._executor.timeline()

  def sync_model(self) -> Any:
    """Writes what was trained, and other state, into the model; returns it.

    Params keep their dtypes and devices.
    """
    self.drain()
    for index, (leaf, param) in enumerate(
      zip(self._setup.split.shape.leaves, self._setup.split.params, strict=True)
    ):
      old = param.get_value()
      master = self._state.read(index, "master", 0, leaf.size)
      values = master.reshape(leaf.shape).astype(old.dtype)
      on_device = isinstance(old, jax.Array)
      param.set_value(
        jax.device_put(values, old.sharding) if on_device else values
      )
    self._setup.split.write_other(self._state.other)
    return self._model

  def close(self) -> None:
    """Ends the threads, after the work under way; may be called again."""
    self._finalizer()
    self._stepper.close()

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
        self._take_back(error)
      else:
        self._broken = error
      raise

  def _take_back(self, error: StepError) -> None:
    """Brings back the state before a step; interrupted, it is broken.

    The failure is forgotten at last, since until then nothing else says that
    there is a step to take back.

    Raises:
      StepError: the same, if that failed as well; the state is broken then.
    """
    step = error.data
    self._broken, step.state_touched = error, True
    try:
      self._parts.take_back(step)
    except Exception as another:
      causes = [x for x in (error.__cause__, another) if x is not None]
      raise error from BaseExceptionGroup("and taking it back", causes)
    self._state.other = list(step.other_before)
    self._state.scale = step.scale
    self._state.num_steps = step.number
    self._broken, step.state_touched = None, False
    self._executor.forget_failure()
