"""What the Trainer refuses, and the odd models that it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sojax
from sojax.models.gpt import abstract_gpt
from sojax.models.stage import Stage
from tests.training import (
  SEQ_LEN,
  VOCAB_SIZE,
  assert_same_bits,
  batches,
  config,
  mesh_of,
  optimizer,
  small_gpt,
  state_of,
  trainer,
  watching,
)

TOKENS = batches(1)[0]["tokens"]


def with_token(value):
  tokens = TOKENS.copy()
  tokens[1, 3] = value
  return tokens


@pytest.mark.parametrize(
  ("batch", "message"),
  [
    ({}, "it must have 'tokens'"),
    ({"tokens": TOKENS, "labels": TOKENS}, r"keys \['labels', 'tokens'\]"),
    ({"tokens": TOKENS.tolist()}, "tokens is a list; it must be a NumPy"),
    ({"tokens": jnp.asarray(TOKENS)}, "it must be a NumPy array"),
    ({"tokens": TOKENS.astype(np.int64)}, "tokens is int64; it must be int32"),
    ({"tokens": TOKENS[:, :-1]}, r"shape \(4, 24\); it must be \[rows"),
    ({"tokens": TOKENS[:3]}, "tokens has 3 rows"),
    ({"tokens": TOKENS[0]}, r"shape \(25,\)"),
    ({"tokens": with_token(-1)}, r"token -1 is out of range.*\[0, 256\)"),
    ({"tokens": with_token(256)}, r"token 256 is out of range.*\[0, 256\)"),
    (
      {"tokens": TOKENS, "loss_mask": np.ones((4, SEQ_LEN + 1), bool)},
      r"loss_mask has shape \(4, 25\)",
    ),
    (
      {"tokens": TOKENS, "loss_mask": np.ones((4, SEQ_LEN))},
      "loss_mask is float64",
    ),
    (
      {"tokens": TOKENS, "loss_mask": np.zeros((4, SEQ_LEN), np.float32)},
      "0 everywhere",
    ),
    (
      {"tokens": TOKENS, "loss_mask": -np.ones((4, SEQ_LEN), np.float32)},
      "must not be negative",
    ),
  ],
)
def test_a_wrong_batch_is_refused_and_changes_nothing(batch, message):
  with trainer() as ours:
    before = state_of(ours)
    with pytest.raises(ValueError, match=message):
      ours.step(batch)
    with pytest.raises(ValueError, match=message):
      ours.evaluate(batch)
    assert_same_bits(state_of(ours), before)
    assert ours.num_steps == 0


class Plain:
  """No Flax module."""


class Empty(nnx.Module):
  """A model of no stages."""

  def stages(self):
    return []


class Repeats(nnx.Module):
  """A model whose stages have the same name."""

  def __init__(self, names=("a", "a")):
    self.names = names
    self.parts = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in names])

  def stages(self):
    return [
      Stage(name=name, module=part)
      for name, part in zip(self.names, self.parts, strict=True)
    ]


class Pair(nnx.Module):
  """Returns two arrays."""

  def __call__(self, x):
    return x, x


class Grows(nnx.Module):
  """Makes a Variable while it runs."""

  def __call__(self, x):
    self.seen = nnx.Variable(x)
    return x


class Double(nnx.Module):
  """Makes the activation twice as wide."""

  def __call__(self, x):
    return jnp.concatenate([x, x], axis=-1)


class Last(nnx.Module):
  """Averages over the width, against the targets."""

  def __init__(self, loss):
    self.kind = loss
    self.scale = nnx.Param(jnp.ones(()))

  def loss(self, x, targets, mask):
    wrong = mask * (self.scale[...] * x.mean(-1) - targets / 256) ** 2
    return wrong.sum() if self.kind == "scalar" else wrong


class Pooled(nnx.Embed):
  """Returns one number for each position."""

  def __init__(self):
    super().__init__(VOCAB_SIZE, 8, rngs=nnx.Rngs(0))

  def __call__(self, inputs):
    return super().__call__(inputs).sum(-1)


class Chain(nnx.Module):
  """An embedding, some middle stage, and a loss; a scalar Param in it."""

  def __init__(self, middle, *, loss="scalar"):
    self.embed = nnx.Embed(VOCAB_SIZE, 8, rngs=nnx.Rngs(0))
    self.middle = globals()[middle]()
    self.last = Last(loss)

  def stages(self):
    return [
      Stage(name=name, module=getattr(self, name))
      for name in ("embed", "middle", "last")
    ]


class Outside(Chain):
  """Has a Param that no stage holds."""

  def __init__(self):
    super().__init__("Double")
    self.extra = nnx.Param(jnp.ones(3))


class Shared(Chain):
  """Two stages draw from one stream of random keys."""

  def __init__(self):
    super().__init__("Double")
    self.middle.rngs = self.embed.rngs = nnx.Rngs(0).dropout


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_stages_without_parameters_and_with_scalars_train(precision, weights):
  """A middle stage that changes the activation's shape, too."""
  adamw = sojax.adamw(1e-2, weight_decay=0.0)
  ours = sojax.Trainer(
    Chain("Double"), adamw, config(precision=precision), {"weights": weights}
  )
  with ours:
    losses = [ours.step(batch).loss for batch in batches(20)]
  assert np.mean(losses[-3:]) < np.mean(losses[:3])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"model": Plain()}, "Plain; it must be a Flax NNX module"),
    ({"model": Empty()}, "gave no stage"),
    ({"model": Repeats()}, "stage name 'a' repeats"),
    ({"model": abstract_gpt(small_gpt().config)}, "embed.* is abstract"),
    ({"model": Outside()}, "extra of the model is in none of its stages"),
    ({"model": Shared()}, "one Variable in two stages.*rngs.fork"),
    ({"model": Chain("Pair")}, "'middle' returns .*one floating-point array"),
    ({"model": Chain("Grows")}, "'middle' changes which other state"),
    (
      {"model": nnx.Embed(256, 8, rngs=nnx.Rngs(0)), "loss": 3},
      "loss is a int",
    ),
    ({"loss": lambda y, targets, mask: mask}, r"shape \(4, 24\); it must be"),
    (
      {"loss": lambda y, targets, mask: 1},
      "returns .*int32.*one floating-point",
    ),
    ({"model": Pooled()}, r"must return logits \(4, 24, 'vocabulary size'\)"),
    ({"model": Chain("Double", loss="vector")}, r"shape \(4, 24\); it must be"),
    ({"plan": None}, "plan=None is neither a Plan"),
    ({"plan": {"pool_threads": 5000}}, "num_threads=5000"),
    ({"plan": {"pool_cores": (99999,)}}, r"cores=\(99999,\) must be among"),
    (
      {"plan": {"pool_threads": 5000, "gradients_out": "callback"}},
      "num_threads=5000",
    ),
    (
      {
        "plan": {"gradients_out": "io_callback", "weights": "flow"},
        "mesh": mesh_of(2),
      },
      "io_callback on 2 devices can hang",
    ),
    ({"plan": {"numa_node": 999}}, "numa_node=999 is not a NUMA node"),
    ({"config": {"micro_batch": 4}}, "config is a dict; use TrainConfig"),
    (
      {"optimizer": sojax.adamw(lambda count: np.ones(2))},
      r"learning_rate has shape \(2,\) at step count 0",
    ),
    ({"optimizer": optax.adamw(1e-3)}, "use sojax.adamw"),
    ({"optimizer": sojax.adamw(1e-3, mask={"x": True})}, "mask does not fit"),
    ({"optimizer": sojax.adamw(1e-3, mask=3.0)}, "mask holds 3.0"),
    (
      {"optimizer": sojax.partition({"a": sojax.adamw(1e-3)}, "b")},
      "label 'b' has no transform",
    ),
    ({"trainable": nnx.PathContains("nothing")}, "selects no parameter"),
    ({"plan": {"device_buckets": 99}}, "device_buckets=99 exceeds"),
    (
      {"plan": {"activations": ("keep", "keep", "offload")}},
      "activations names 3 stages, but the model has 4; name one for each",
    ),
    (
      {"plan": {"weights": ("flow", "stationary")}},
      "weights names 2 stages, but the model has 4; name one for each",
    ),
    (
      {
        "plan": {
          "weights": ("stationary", "flow", "stationary", "flow"),
          "device_buckets": 3,
        }
      },
      r"device_buckets=3 would keep masters of stage 1 \('block_0'\) on the"
      ".* make them 'stationary', or lower device_buckets to 1",
    ),
    (
      {"plan": {"weights": ("stationary", *["flow"] * 3), "host_ratio": 0.25}},
      r"host_ratio=0.25 would keep masters of stage 1 .* raise host_ratio until"
      " at most 1 are there",
    ),
    ({"plan": {"fast": True}}, "unknown plan switch 'fast'"),
    ({"config": config(seq_len=33)}, "33 tokens is longer than max_seq_len=32"),
    (
      {"mesh": jax.make_mesh((1, 2), ("data", "seq"))},
      "axis 'seq' has 2 devices",
    ),
    ({"mesh": jax.make_mesh((1,), ("data",))}, "mesh axes"),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_argument_is_refused_before_anything_is_taken(
  arguments, message
):
  good = {
    "model": small_gpt(),
    "optimizer": optimizer(),
    "config": config(),
    "plan": {},
  }
  with watching() as taken, pytest.raises(ValueError, match=message):
    sojax.Trainer(**(good | arguments))
  assert not taken
