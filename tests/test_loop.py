"""Oracle: the whole model under jax.grad, and optax by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from sojax.models.gpt import GPT, GPTConfig
from sojax.plan.config import TrainConfig
from sojax.reference.loop import Loop, to_bfloat16

MODEL = GPTConfig(
  vocab_size=17, num_layers=1, hidden_dim=8, num_heads=2, max_seq_len=6
)
CONFIG = TrainConfig(micro_batch=4, seq_len=6, clip_norm=None)
EPS_FP32 = 2.0**-23


def build(**changes):
  return GPT(dataclasses.replace(MODEL, **changes), rngs=nnx.Rngs(0))


def make_batch(seed=0, rows=4):
  rng = np.random.default_rng(seed)
  return {
    "tokens": rng.integers(0, 17, (rows, 7)).astype(np.int32),
    "loss_mask": rng.integers(0, 2, (rows, 6)).astype(np.float32),
  }


@nnx.jit
def whole_model(model, tokens, mask):
  """Returns the mean loss and its gradients by the model's own paths."""

  def loss(model):
    losses = optax.softmax_cross_entropy_with_integer_labels(
      model(tokens[:, :-1]), tokens[:, 1:]
    )
    return (losses * mask).sum() / mask.sum()

  return nnx.value_and_grad(loss)(model)


def name_of(path):
  """Names a parameter of the whole model as stages name it."""
  if path[0] == "blocks":
    path = (f"block_{path[1]}", *path[2:])
  return ".".join(map(str, path))


def by_name(state):
  return {name_of(path): x[...] for path, x in nnx.to_flat_state(state)}


def assert_close(got, want, bound):
  assert got.keys() == want.keys()
  for name in want:
    np.testing.assert_allclose(
      np.asarray(got[name], np.float64),
      np.asarray(want[name], np.float64),
      rtol=0,
      atol=bound,
      err_msg=name,
    )


def test_gradients_are_the_whole_models_by_name():
  model, batch = build(), make_batch()
  loop = Loop(model, optax.sgd(1.0), CONFIG)
  loss, grads = loop.loss_and_grads(batch)
  want_loss, want = whole_model(model, batch["tokens"], batch["loss_mask"])
  assert "block_0.attn.qkv.kernel" in grads and "head.table" not in grads
  # A mean of terms below 1, each a sum over at most 32 and 17 terms.
  bound = EPS_FP32 * (32 + 17) * 2
  assert_close(grads, by_name(want), bound)
  assert abs(float(loss - want_loss)) <= bound
  # Given parameters take the place of the loop's own.
  zeros = {name: np.zeros(x.shape, np.float32) for name, x in grads.items()}
  loss, _ = loop.loss_and_grads(batch, zeros)
  assert float(loss) == pytest.approx(np.log(17), rel=4 * EPS_FP32)


@pytest.mark.parametrize(
  ("variant", "accumulation"), [("one_jit", 1), ("two_jits", 2)]
)
def test_steps_are_optax_of_the_whole_models_gradients(variant, accumulation):
  model = build()
  # Decay the matrices only; the gradients' norm is above the bound.
  optimizer = optax.adamw(
    1e-2,
    eps=1e-3,
    weight_decay=0.5,
    mask=functools.partial(jax.tree.map, lambda p: p.ndim > 1),
  )
  config = TrainConfig(
    micro_batch=4 // accumulation,
    accumulation=accumulation,
    seq_len=6,
    clip_norm=0.05,
  )
  loop = Loop(model, optimizer, config, variant=variant)
  whole = optax.chain(optax.clip_by_global_norm(0.05), optimizer)

  @jax.jit
  def update(grads, state, params):
    updates, state = whole.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = by_name(nnx.state(model, nnx.Param))
  state = whole.init(params)
  for seed in range(3):
    batch = make_batch(seed)
    loss = loop.step(batch)
    want_loss, grads = whole_model(model, batch["tokens"], batch["loss_mask"])
    assert optax.tree.norm(grads) > 0.1
    params, state = update(by_name(grads), state, params)
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
      param[...] = params[name_of(path)]
    # A gradient's error is as above, then scaled down by clipping; Adam divides
    # it by eps at least, so that it grows by at most lr / eps = 10 each step.
    bound = EPS_FP32 * (32 + 17) * 2 * 10 * 3
    assert abs(float(loss - want_loss)) <= bound
    assert_close(loop.params, params, bound)


@pytest.fixture(scope="module")
def dropout_runs():
  """Returns a model with dropout, and losses and loop of each variant."""
  config = dataclasses.replace(CONFIG, micro_batch=2, accumulation=2)
  model = build(dropout=0.5)
  runs = {}
  for variant in ("one_jit", "two_jits"):
    loop = Loop(model, optax.sgd(0.1), config, variant=variant)
    runs[variant] = loop, [float(loop.step(make_batch())) for _ in range(3)]
  return model, runs


def test_models_own_state_survives_donation_and_training(dropout_runs):
  model, _ = dropout_runs
  fresh = build(dropout=0.5)
  for x, y in zip(
    jax.tree.leaves(nnx.state(model)),
    jax.tree.leaves(nnx.state(fresh)),
    strict=True,
  ):
    assert jnp.array_equal(x, y)


def test_dropout_advances_with_every_micro_batch(dropout_runs):
  for loop, losses in dropout_runs[1].values():
    counts = [
      int(state["dropout"]["rngs"]["count"][...]) for state in loop.other[:-1]
    ]
    assert counts == [6, 12]
    assert len(set(losses)) == 3


def test_variants_draw_the_same_dropout(dropout_runs):
  losses = [losses for _, losses in dropout_runs[1].values()]
  # The same formulas in two programs; another draw changes some per cent.
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_bfloat16_computes_at_rounded_parameters():
  model, batch = build(), make_batch()
  config = dataclasses.replace(CONFIG, precision="bf16")
  loss, grads = Loop(model, optax.sgd(1.0), config).loss_and_grads(batch)
  exact_loss, exact = Loop(model, optax.sgd(1.0), CONFIG).loss_and_grads(batch)
  assert loss.dtype == jnp.float32
  for name, x in grads.items():
    assert x.dtype == jnp.float32
    # Some tens of roundings by 2^-9 of what the largest is made of.
    largest = max(float(jnp.abs(exact[name]).max()), 1e-3)
    np.testing.assert_allclose(x, exact[name], rtol=0, atol=0.1 * largest)
  assert float(loss) == pytest.approx(float(exact_loss), rel=2.0**-7)
  assert float(loss) != float(exact_loss)


def test_to_bfloat16_rounds_ties_away_from_zero():
  # 1 + 2^-8 is half way between neighbours 1 and 1 + 2^-7.
  x = np.array(
    [1 + 2**-8, -1 - 2**-8, 1 + 2**-8 - 2**-20, np.nan, -np.inf, 3e38, 1e-40],
    np.float32,
  )
  want = np.array(
    [1 + 2**-7, -1 - 2**-7, 1, np.nan, -np.inf, 3e38, 1e-40], ml_dtypes.bfloat16
  )
  want_bits = want.view(np.uint16)
  want_bits[3] = 0x7FC0
  got = np.asarray(jax.jit(to_bfloat16)(x))
  assert np.array_equal(got.view(np.uint16), want_bits)


def test_a_fully_masked_batch_has_loss_zero_and_no_gradient():
  batch = make_batch()
  batch["loss_mask"] = np.zeros((4, 6), bool)
  loss, grads = Loop(build(), optax.sgd(1.0), CONFIG).loss_and_grads(batch)
  assert float(loss) == 0.0
  assert all(jnp.all(x == 0.0) for x in grads.values())


def test_refuses_another_shape_and_an_unknown_variant():
  with pytest.raises(ValueError, match=r"shape \(3, 7\) .* asks for \(4, 7\)"):
    Loop(build(), optax.sgd(1.0), CONFIG).step(make_batch(rows=3))
  with pytest.raises(ValueError, match="variant='fast' is not one of one_jit"):
    Loop(build(), optax.sgd(1.0), CONFIG, variant="fast")
