"""Oracle: the transformer's formulas in float64 NumPy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from sojax.models import presets
from sojax.models.gpt import GPT, Embed, GPTConfig, abstract_gpt

CONFIG = GPTConfig(
  vocab_size=37, num_layers=2, hidden_dim=24, num_heads=3, max_seq_len=20
)
EPS_FP32 = 2.0**-23


def build(**changes):
  """Returns a GPT all of whose parameters matter, biases too."""
  model = GPT(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))
  rng = np.random.default_rng(0)
  for _, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    noise = rng.standard_normal(param.shape) * 0.1
    param[...] = param[...] + jnp.asarray(noise, jnp.float32)
  return model


def cast(model, dtype):
  """Casts a model's parameters in place and returns it."""
  for _, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    param.set_value(param[...].astype(dtype))
  return model


def tokens(B, T, vocab_size=37):
  rng = np.random.default_rng(B * T)
  return jnp.asarray(rng.integers(0, vocab_size, (B, T)), jnp.int32)


def named(module):
  """Returns a module's parameters by path, float64."""
  flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
  return {
    ".".join(map(str, path)): np.asarray(param[...], np.float64)
    for path, param in flat
  }


def numpy_norm(x, scale, bias):
  x = x - x.mean(-1, keepdims=True)
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + bias


def numpy_block(x, p, num_heads):
  """Computes one block from its formulas, float64."""
  B, T, D = x.shape
  y = numpy_norm(x, p["attn_norm.scale"], p["attn_norm.bias"])
  qkv = y @ p["attn.qkv.kernel"] + p["attn.qkv.bias"]
  q, k, v = (
    a.reshape(B, T, num_heads, -1).swapaxes(1, 2) for a in np.split(qkv, 3, -1)
  )
  s = q @ k.swapaxes(-1, -2) / math.sqrt(D / num_heads)
  s = np.exp(np.where(np.tri(T, dtype=bool), s, -np.inf))
  y = (s / s.sum(-1, keepdims=True)) @ v
  y = y.swapaxes(1, 2).reshape(B, T, D)
  x = x + y @ p["attn.out.kernel"] + p["attn.out.bias"]
  y = numpy_norm(x, p["mlp_norm.scale"], p["mlp_norm.bias"])
  y = y @ p["mlp.up.kernel"] + p["mlp.up.bias"]
  y = y / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
  return x + y @ p["mlp.down.kernel"] + p["mlp.down.bias"]


def numpy_logits(model, tokens_BT):
  embed, head = named(model.embed), named(model.head)
  x = embed["tokens"][tokens_BT] + embed["positions"][: tokens_BT.shape[1]]
  for block in model.blocks:
    x = numpy_block(x, named(block), model.config.num_heads)
  x = numpy_norm(x, head["norm.scale"], head["norm.bias"])
  return x @ head["table"].T


def numpy_loss(logits, targets, mask):
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  at_target = np.take_along_axis(log_p, np.asarray(targets)[..., None], -1)
  return -(at_target[..., 0] * mask).sum()


@nnx.jit
def logits_of(model, tokens_BT):
  return model(tokens_BT)


@nnx.jit
def logits_by_stage(model, tokens_BT):
  x = tokens_BT
  for stage in model.stages():
    x = stage.module(x)
  return x


@nnx.jit
def loss_by_stage(model, rows, mask):
  *others, last = model.stages()
  x = rows[:, :-1]
  for stage in others:
    x = stage.module(x)
  return last.module.loss(x, rows[:, 1:], mask)


@pytest.mark.parametrize(
  ("T", "tie_head"), [(1, True), (13, True), (20, False)]
)
def test_logits_equal_float64(T, tie_head):
  model, tokens_BT = build(tie_head=tie_head), tokens(2, T)
  want = numpy_logits(model, tokens_BT)
  got = logits_of(model, tokens_BT)
  assert got.dtype == jnp.float32
  # Each of two blocks rounds sums of at most 4 * 24 terms below 4; each of
  # the logits' 24 terms carries that error times a table entry below 0.5.
  bound = 2 * EPS_FP32 * 4 * 96 * 24 * 0.5
  np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=bound)
  assert np.abs(want).max() > 1.0


def test_block_equals_float64_within_less_than_the_other_gelu():
  block = build().blocks[0]
  x = np.random.default_rng(0).standard_normal((8, 20, 24))
  got = nnx.jit(lambda block, x: block(x))(block, jnp.asarray(x, jnp.float32))
  want = numpy_block(x.astype(np.float32).astype(np.float64), named(block), 3)
  # The widest sum has 4 * 24 terms, mostly below 1; half of the roundings
  # have the other sign. The exact GELU would differ by 2e-4.
  bound = EPS_FP32 * 96 * 2
  np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=bound)


def test_loss_equals_float64():
  model, rows = build(loss_chunk_tokens=7), tokens(3, 14)
  mask = np.random.default_rng(0).integers(0, 2, (3, 13)).astype(np.float32)
  got = loss_by_stage(model, rows, mask)
  want = numpy_loss(numpy_logits(model, rows[:, :-1]), rows[:, 1:], mask)
  # As for the logits, for each of at most 39 positions.
  bound = 39 * 2 * EPS_FP32 * 4 * 96 * 24 * 0.5
  assert got.dtype == jnp.float32 and got.shape == ()
  assert abs(float(got) - want) <= bound


def test_stages_in_order_are_the_model():
  model, tokens_BT = build(), tokens(2, 13)
  names = [stage.name for stage in model.stages()]
  assert names == ["embed", "block_0", "block_1", "head"]
  assert jnp.array_equal(
    logits_by_stage(model, tokens_BT), logits_of(model, tokens_BT)
  )


def test_stages_hold_the_models_own_parameters():
  model = build()
  ours = {id(p) for _, p in nnx.to_flat_state(nnx.state(model, nnx.Param))}
  theirs = {
    id(p)
    for stage in model.stages()
    for _, p in nnx.to_flat_state(nnx.state(stage.module, nnx.Param))
  }
  assert ours == theirs
  assert model.head.table is model.embed.tokens
  assert model.stages()[-1].module.table is model.embed.tokens


@jax.jit
def staged_gradients(states, rows, mask):
  """Differentiates stage by stage, by hand, as a staged trainer does."""
  graphdefs = [nnx.split(s.module)[0] for s in build().stages()]

  def forward(i, state, x):
    return nnx.merge(graphdefs[i], state)(x)

  def loss(state, x):
    head = nnx.merge(graphdefs[-1], state)
    return head.loss(x, rows[:, 1:], mask)

  embed = functools.partial(forward, 0, x=rows[:, :-1])
  x, backward = jax.vjp(embed, states[0])
  backwards = [backward]
  for i in range(1, len(states) - 1):
    x, backward = jax.vjp(functools.partial(forward, i), states[i], x)
    backwards.append(backward)
  gradient, d_x = jax.grad(loss, (0, 1))(states[-1], x)
  gradients = [gradient]
  for backward in reversed(backwards[1:]):
    gradient, d_x = backward(d_x)
    gradients.append(gradient)
  gradients.extend(backwards[0](d_x))
  return gradients[::-1]


@nnx.jit
def whole_gradients(model, rows):
  """Differentiates the whole model's logits."""

  def loss(model):
    log_p = jax.nn.log_softmax(model(rows[:, :-1]))
    return -jnp.take_along_axis(log_p, rows[:, 1:, None], axis=-1).sum()

  return nnx.grad(loss)(model)


def test_gradients_by_stage_are_the_whole_models_and_add_up_where_tied():
  model, rows = build(), tokens(2, 14)
  mask = jnp.ones((2, 13), jnp.float32)
  states = [nnx.state(stage.module) for stage in model.stages()]
  embed, *blocks, head = staged_gradients(states, rows, mask)
  want = whole_gradients(model, rows)
  at_input, at_output = embed["tokens"][...], head["table"][...]
  pairs = [
    (at_input + at_output, want["embed"]["tokens"]),
    (embed["positions"], want["embed"]["positions"]),
    (head["norm"], want["head"]["norm"]),
    *((block, want["blocks"][i]) for i, block in enumerate(blocks)),
  ]
  # 26 positions, 4 * 24 and 37 terms each below 4, through two blocks.
  bound = 2 * EPS_FP32 * 26 * (4 * 24 + 37) * 4
  for got, wanted in pairs:
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    for x, y in zip(got, wanted, strict=True):
      np.testing.assert_allclose(x, y, rtol=0, atol=bound)
      assert jnp.abs(y).max() > 10 * bound
  # Neither end alone is near their sum.
  assert jnp.abs(at_input).max() > 10 * bound
  assert jnp.abs(at_output).max() > 10 * bound


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_one_trace_serves_all_blocks(dropout):
  model = build(dropout=dropout)
  traces = []

  @functools.partial(jax.jit, static_argnums=0)
  def run(graphdef, params, rest, x):
    traces.append(x.shape)
    return nnx.merge(graphdef, params, rest)(x)

  splits = [nnx.split(block, nnx.Param, ...) for block in model.blocks]
  assert len({graphdef for graphdef, _, _ in splits}) == 1
  assert len({hash(graphdef) for graphdef, _, _ in splits}) == 1
  x = jnp.ones((2, 5, 24))
  outputs = [run(*split, x) for split in splits]
  assert traces == [(2, 5, 24)]
  assert not jnp.array_equal(outputs[0], outputs[1])


def test_without_dropout_there_is_no_other_state():
  _, _, rest = nnx.split(build(), nnx.Param, ...)
  assert not jax.tree.leaves(rest)


def test_dropout_draws_from_state_that_is_carried():
  block = build(dropout=0.25).blocks[0]
  graphdef, params, state = nnx.split(block, nnx.Param, ...)
  x = jnp.ones((2, 5, 24))

  @jax.jit
  def run(state):
    module = nnx.merge(graphdef, params, state, copy=True)
    y = module(x)
    return y, nnx.split(module, nnx.Param, ...)[2]

  first, next_state = run(state)
  again, _ = run(state)
  second, _ = run(next_state)
  assert jnp.array_equal(first, again)
  assert not jnp.array_equal(first, second)
  # Attention's and the feed-forward's draw.
  assert state["dropout"]["rngs"]["count"][...] == 0
  assert next_state["dropout"]["rngs"]["count"][...] == 2


def test_stages_drop_different_elements():
  model = build(dropout=0.25)
  streams = [module.dropout.rngs for module in (model.embed, *model.blocks)]
  keys = {jax.random.key_data(s.key[...]).tobytes() for s in streams}
  assert len(keys) == 3


def test_dropout_keeps_the_mean_and_drops_its_share():
  config = dataclasses.replace(CONFIG, dropout=0.25, hidden_dim=240)
  embed = Embed(config, rngs=nnx.Rngs(0))
  tokens_BT = tokens(20, 20)
  dropped = embed(tokens_BT)
  embed.eval()
  kept = embed(tokens_BT)
  is_zero = dropped == 0.0
  # 96,000 draws: four standard deviations of a share of 1/4 are 0.0056.
  assert abs(float(is_zero.mean()) - 0.25) <= 0.0056
  np.testing.assert_allclose(
    dropped, jnp.where(is_zero, 0.0, kept / 0.75), rtol=2 * EPS_FP32
  )


def dot_operand_dtypes(jaxpr, found):
  """Collects the dtypes of the operands of every product in a jaxpr."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      found.update(str(v.aval.dtype) for v in eqn.invars)
    for sub in jaxprs_in_params(eqn.params):
      dot_operand_dtypes(sub, found)
  return found


def test_bfloat16_parameters_make_every_product_bfloat16():
  model = cast(build(loss_chunk_tokens=8), jnp.bfloat16)
  rows, mask = tokens(2, 14), jnp.ones((2, 13), jnp.float32)
  graphdef, state = nnx.split(model)
  dtypes = []

  def loss(state):
    *others, last = nnx.merge(graphdef, state).stages()
    x = rows[:, :-1]
    for stage in others:
      x = stage.module(x)
      dtypes.append(x.dtype)
    dtypes.append(last.module(x).dtype)
    return last.module.loss(x, rows[:, 1:], mask)

  jaxpr, (value, gradient) = jax.make_jaxpr(
    jax.value_and_grad(loss), return_shape=True
  )(state)
  assert dtypes == ["bfloat16", "bfloat16", "bfloat16", "float32"]
  assert dot_operand_dtypes(jaxpr.jaxpr, set()) == {"bfloat16"}
  assert value.dtype == jnp.float32
  assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {
    jnp.dtype("bfloat16")
  }


def test_layer_norm_of_bfloat16_is_computed_in_float32():
  norm = cast(GPT(CONFIG, rngs=nnx.Rngs(0)), jnp.bfloat16).head.norm
  rng = np.random.default_rng(0)
  # Spacing of bfloat16 at 200 is 1: a mean computed in it is off by half the
  # deviation.
  x = jnp.asarray(200 + rng.standard_normal((2, 5, 24)), jnp.bfloat16)
  want = numpy_norm(np.asarray(x, np.float64), 1.0, 0.0)
  got = norm(x)
  assert got.dtype == jnp.bfloat16
  # The result's rounding, and float32 ones of terms of 200.
  np.testing.assert_allclose(
    np.asarray(got, np.float64), want, rtol=2.0**-8, atol=200 * 24 * EPS_FP32
  )


def test_bfloat16_gradients_over_many_positions_are_summed_in_float32():
  config = dataclasses.replace(CONFIG, max_seq_len=2048)
  embed = cast(GPT(config, rngs=nnx.Rngs(0)), jnp.bfloat16).embed
  graphdef, params = nnx.split(embed, nnx.Param)
  same = jnp.zeros((2, 2048), jnp.int32)

  def total(params):
    return nnx.merge(graphdef, params)(same).astype(jnp.float32).sum()

  gradient = jax.jit(jax.grad(total))(params)["tokens"][...]
  # Adding ones up in bfloat16 stops at 256.
  assert jnp.all(gradient[0] == 4096.0)
  assert jnp.all(gradient[1:] == 0.0)


@pytest.mark.parametrize("check_vma", [True, False])
def test_embed_runs_inside_shard_map_on_an_explicit_mesh(check_vma):
  embed = build().embed
  graphdef, params, rest = nnx.split(embed, nnx.Param, ...)
  tokens_BT = tokens(4, 13)
  mesh = jax.make_mesh((2,), ("data",))
  data, everywhere = jax.P("data"), jax.P()

  def gradient(params, tokens_BT, scale_B):
    def total(params):
      x = nnx.merge(graphdef, params, rest)(tokens_BT)
      return (x * scale_B[:, None, None]).sum()

    gradient = jax.grad(total)(params)["tokens"][...]
    return gradient

  def shard(params, tokens_BT, scale_B):
    d_table = gradient(params, tokens_BT, scale_B)
    return d_table if check_vma else jax.lax.psum(d_table, "data")

  scale_B = jnp.arange(1.0, 5.0)
  want = gradient(params, tokens_BT, scale_B)
  got = jax.jit(
    jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=(everywhere, data, data),
      out_specs=everywhere,
      check_vma=check_vma,
    )
  )(
    jax.device_put(params, jax.NamedSharding(mesh, everywhere)),
    jax.device_put(tokens_BT, jax.NamedSharding(mesh, data)),
    jax.device_put(scale_B, jax.NamedSharding(mesh, data)),
  )
  # Sums of small integers: exact.
  assert jnp.array_equal(np.asarray(got), np.asarray(want))


def test_initial_parameters_have_the_documented_deviations():
  config = dataclasses.replace(
    CONFIG, hidden_dim=192, vocab_size=400, num_layers=2
  )
  model = GPT(config, rngs=nnx.Rngs(0))
  block = model.blocks[1]
  residual = 0.02 / math.sqrt(2 * 2)
  for param, stddev in [
    (model.embed.tokens, 0.02),
    (block.attn.qkv.kernel, 0.02),
    (block.mlp.up.kernel, 0.02),
    (block.attn.out.kernel, residual),
    (block.mlp.down.kernel, residual),
  ]:
    # At least 36,000 draws: 4 standard deviations are 1.5 %.
    assert float(param[...].std()) == pytest.approx(stddev, rel=0.015)
    assert abs(float(param[...].mean())) <= 4 * stddev / math.sqrt(36000)
  for param in (block.attn.qkv.bias, block.mlp.down.bias, model.head.norm.bias):
    assert jnp.all(param[...] == 0.0)
  assert jnp.all(model.head.norm.scale[...] == 1.0)
  assert not jnp.array_equal(
    block.mlp.up.kernel[...], model.blocks[0].mlp.up.kernel[...]
  )


@pytest.mark.usefixtures("no_garbage")
def test_abstract_25b_takes_no_memory():
  before = sum(x.nbytes for x in jax.live_arrays())
  model = abstract_gpt(presets.gpt("25b"))
  after = sum(x.nbytes for x in jax.live_arrays())
  assert after - before <= 1024
  leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
  assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
  assert sum(math.prod(leaf.shape) for leaf in leaves) > 24e9
  assert [s.name for s in model.stages()][-2:] == ["block_29", "head"]
  assert model.head.table is model.embed.tokens


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.1}, {"tie_head": False}])
def test_an_abstract_model_is_the_shape_of_a_real_one(changes):
  """Though only one of its blocks is traced. Oracle: all of it, traced."""
  config = dataclasses.replace(CONFIG, num_layers=3, **changes)
  ours = nnx.split(abstract_gpt(config))
  theirs = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
  assert ours == theirs
  blocks = abstract_gpt(config).blocks
  assert len({id(block.mlp.up.kernel) for block in blocks}) == 3


def test_sequence_longer_than_the_positions_is_refused():
  with pytest.raises(ValueError, match="21 tokens .* max_seq_len=20; shorten"):
    build()(tokens(1, 21))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
    ({"num_heads": 5}, "hidden_dim=24 is not a multiple of num_heads=5"),
    ({"dropout": 1.0}, r"dropout=1.0 must be in \[0, 1\)"),
    ({"attention": "flash"}, "attention='flash' is not one of auto"),
    ({"loss_chunk_tokens": 0}, "loss_chunk_tokens=0 must be at least 1"),
  ],
)
def test_impossible_configs_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(CONFIG, **changes)
