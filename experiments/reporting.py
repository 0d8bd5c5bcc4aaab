"""What is known of a training run, and how it is shown while it runs."""

import dataclasses
import math
import os
import time

import tensorboardX
import tqdm

from sojax.runtime.metrics import StepMetrics


@dataclasses.dataclass(kw_only=True)
class Progress:
  """Figures of a run from its first step on; saved in its checkpoints."""

  steps: int = 0
  """Steps taken."""
  initial_loss: float = math.nan
  """Loss of the first step, in nats per token."""
  final_loss: float = math.nan
  """Loss of the last step, in nats per token."""
  clipped: int = 0
  """Steps whose gradient was scaled down."""
  skipped: int = 0
  """Steps whose gradient was not finite, and which changed nothing."""
  speculated: int = 0
  """Steps of which some updates ran ahead of their validation."""
  taken_back: int = 0
  """Those of them of which some update was undone or redone."""
  exposed_host_s: float = 0.0
  """Seconds in which the device waited for the host, over all steps."""

  def add(self, metrics: StepMetrics) -> None:
    """Takes the next step's metrics into account."""
    if not self.steps:
      self.initial_loss = metrics.loss
    self.steps += 1
    self.final_loss = metrics.loss
    self.clipped += int(metrics.clipped)
    self.skipped += int(metrics.skipped)
    self.speculated += int(metrics.speculated > 0)
    self.taken_back += int(metrics.redone + metrics.undone > 0)
    self.exposed_host_s += metrics.exposed_host_s


class Reporter:
  """Shows steps in a progress bar and writes them to a TensorBoard log.

  Reading the metrics of a step waits for it. So the reporter holds on to them
  until the next step is under way, and the device never waits for the report.

  Attributes:
    progress: figures of all reported steps.
  """

  def __init__(
    self,
    progress: Progress,
    *,
    num_steps: int,
    tokens_per_step: int,
    log_dir: str | os.PathLike[str],
  ):
    """Opens the bar, on stderr, and the log.

    Args:
      progress: figures of the steps before; updated.
      num_steps: steps of the whole run, for the bar.
      tokens_per_step: tokens that one step trains on.
      log_dir: folder of the TensorBoard log. Its entries from the next step
        on, left by a run that was not saved, no longer show.
    """
    self.progress = progress
    self._tokens_per_step = tokens_per_step
    self._held: StepMetrics | None = None
    self._reported_s: list[float] = []
    self._bar = tqdm.tqdm(
      total=num_steps, initial=progress.steps, unit="step", dynamic_ncols=True
    )
    self._log = tensorboardX.SummaryWriter(
      os.fspath(log_dir), purge_step=progress.steps
    )

  @property
  def tokens_per_s(self) -> float:
    """Speed from the first report to the last, which leaves compilation out.

    NaN until there are two reports.
    """
    if len(self._reported_s) < 2:
      return math.nan
    seconds = self._reported_s[-1] - self._reported_s[0]
    return (len(self._reported_s) - 1) * self._tokens_per_step / seconds

  def add(self, metrics: StepMetrics) -> None:
    """Reports the step before, and holds on to this one."""
    self.flush()
    self._held = metrics

  def flush(self) -> None:
    """Waits for the step that is held, if any, and reports it."""
    metrics, self._held = self._held, None
    if metrics is None:
      return
    self.progress.add(metrics)
    self._reported_s.append(time.perf_counter())
    self._write(metrics)
    self._bar.update()
    self._bar.set_postfix(
      {
        "loss": f"{metrics.loss:.3f}",
        "tokens/s": f"{self.tokens_per_s:.0f}",
        "exposed host ms": f"{1e3 * metrics.exposed_host_s:.1f}",
      }
    )

  def __enter__(self) -> "Reporter":
    return self

  def __exit__(self, exc_type: type | None, *exc_info: object) -> None:
    """Reports the step that is held, and closes the bar and the log."""
    try:
      if exc_type is None:
        self.flush()
    finally:
      self._bar.close()
      self._log.close()

  def _write(self, metrics: StepMetrics) -> None:
    scalars = {
      "loss": metrics.loss,
      "grad_norm": metrics.grad_norm,
      "clipped": float(metrics.clipped),
      "skipped": float(metrics.skipped),
      "clip_scale": metrics.clip_scale,
      "speculated": float(metrics.speculated),
      "committed": float(metrics.committed),
      "redone": float(metrics.redone),
      "undone": float(metrics.undone),
      "record_bytes": float(metrics.record_bytes),
      "escapes": float(metrics.escapes),
      "exposed_host_s": metrics.exposed_host_s,
    }
    for name, value in scalars.items():
      self._log.add_scalar(name, value, metrics.step)
