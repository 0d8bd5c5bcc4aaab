"""Models without stages, and losses of one's own."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sojax
from sojax.reference.loop import Loop
from tests.training import (
  VOCAB_SIZE,
  batches,
  config,
  optimizer,
  small_gpt,
  state_of,
  trainer,
)


class Plain(nnx.Module):
  """A model of tokens to logits, with dropout, that knows nothing of stages."""

  def __init__(self, dim=32):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCAB_SIZE, dim, rngs=rngs)
    self.hidden = nnx.Linear(dim, dim, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.head = nnx.Linear(dim, VOCAB_SIZE, rngs=rngs)

  def __call__(self, tokens_BT):
    x = nnx.gelu(self.hidden(self.embed(tokens_BT)))
    return self.head(self.dropout(x))


def squared_error(logits_BTV, targets_BT, mask_BT):
  """A loss that is not cross entropy."""
  wanted = jnp.eye(VOCAB_SIZE)[targets_BT]
  error = jnp.square(logits_BTV.astype(jnp.float32) - wanted).sum(-1)
  return jnp.sum(mask_BT * error)


def masked(batch):
  """Leaves out some positions, unevenly over the rows."""
  mask = np.ones((len(batch["tokens"]), batch["tokens"].shape[1] - 1), bool)
  mask[0, 5:] = False
  return batch | {"loss_mask": mask}


def train(model, theirs, num_steps=30, **changes):
  """Takes steps of both; returns losses, ours first, and the trainer."""
  ours = sojax.Trainer(
    model, optimizer(), config(**changes.pop("config", {})), **changes
  )
  rows = 4 * ours.config.accumulation
  data = [masked(batch) for batch in batches(num_steps, rows=rows)]
  losses = [
    (ours.step(batch).loss, float(theirs.step(batch))) for batch in data
  ]
  return np.array(losses), ours


def optax_adamw():
  ours = optimizer()
  return optax.adamw(
    ours.learning_rate, b2=ours.b2, weight_decay=0.1, mask=ours.mask
  )


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("weights", ["stationary", "flow"])
@pytest.mark.parametrize("loss", [None, squared_error])
def test_a_model_without_stages_trains_like_plain_optax(
  loss, weights, accumulation
):
  changes = {"accumulation": accumulation}
  theirs = Loop(Plain(), optax_adamw(), config(**changes), loss=loss)
  losses, ours = train(
    Plain(), theirs, loss=loss, plan={"weights": weights}, config=changes
  )
  np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-5)
  assert losses[-1, 0] < losses[0, 0]
  names = [leaf.name for leaf in ours.layout.model.leaves]
  assert "model.hidden.kernel" in names


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_without_stages_trains_in_16_bits(precision):
  with trainer(model=Plain(), precision=precision) as ours:
    losses = [ours.step(batch).loss for batch in batches(30)]
  assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_a_loss_of_ones_own_takes_what_the_last_stage_returns():
  """GPT's last stage has a loss of its own, which must not be taken."""
  theirs = Loop(small_gpt(), optax_adamw(), config(), loss=squared_error)
  losses, ours = train(small_gpt(), theirs, loss=squared_error, num_steps=5)
  np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=1e-5)
  batch = batches(1, seed=1)[0]
  own = sojax.Trainer(small_gpt(), optimizer(), config())
  assert own.evaluate(batch) > 2 * ours.evaluate(batch)


def test_evaluation_of_a_model_without_stages_drops_nothing():
  model = Plain()
  with trainer(model=model) as ours:
    (batch,) = batches(1)
    model.eval()
    logits = model(batch["tokens"][:, :-1])
    expected = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["tokens"][:, 1:]
    ).mean()
    assert ours.evaluate(batch) == pytest.approx(float(expected), rel=1e-6)


def test_each_step_of_a_model_without_stages_draws_other_dropout():
  with trainer(model=Plain(), adamw=sojax.adamw(0.0)) as ours:
    (batch,) = batches(1)
    first, second = (ours.step(batch).loss for _ in range(2))
    counts = {k: v for k, v in state_of(ours).items() if "count" in k}
  assert first != second
  assert any(int(value) == 2 for value in counts.values())
