"""What tests of speculation share: batches that spike, and updates in time."""

import jax.numpy as jnp
import numpy as np

import sojax
from sojax.graph.graph import TaskKind
from sojax.models.loss import cross_entropy
from sojax.runtime.speculation import NormWatch
from tests.training import batches, config, optimizer, small_gpt

SPIKE = 2.0
"""A loss mask that makes a position's loss a thousandfold."""

SCHEMES = ("record3", "record2", "pingpong")


def spiking_loss(logits, targets, mask):
  """Is the cross entropy, but for positions with the mask SPIKE."""
  weights = jnp.where(mask == SPIKE, 1000.0, mask)
  return cross_entropy(logits, targets, weights)


def spiking_batches(count, *, infinite=(), spikes=(), rows=4, seed=0):
  """Makes batches of which some have gradients that are huge, or not finite."""
  made = batches(count, rows=rows, seed=seed)
  for number, batch in enumerate(made):
    mask = np.ones((rows, batch["tokens"].shape[1] - 1), np.float32)
    if number in spikes:
      mask[-1, 1:5] = SPIKE
    if number in infinite:
      mask[-1, 2] = np.inf
    batch["loss_mask"] = mask
  return made


def trainer(plan, *, mesh=None, model=None, **changes):
  """A trainer of the small GPT whose loss can spike."""
  return sojax.Trainer(
    model or small_gpt(),
    optimizer(),
    config(**changes),
    {"bucket_bytes": 1 << 16, **plan},
    mesh,
    loss=spiking_loss,
  )


def let_all_run_ahead(ours, monkeypatch=None) -> None:
  """Makes each Validate wait until all that may run ahead of it have.

  Args:
    ours: a Trainer.
    monkeypatch: if given, no norm ends speculation within a step.
  """
  actions = ours._executor._actions
  validate = actions[TaskKind.VALIDATE]

  def held(task, step):
    wait = validate(task, step)
    (run,) = (r for r in ours._executor._recent if r.step is step)

    def after_updates():
      run.wait_done(
        lambda x: x.kind is TaskKind.HOST_UPDATE and x.index < task.index
      )
      wait()

    return after_updates

  actions[TaskKind.VALIDATE] = held
  if monkeypatch is not None:
    monkeypatch.setattr(NormWatch, "objection", lambda *args: None)
