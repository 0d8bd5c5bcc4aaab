"""Bytes of intermediate values, worked by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import sojax
from sojax import models
from sojax.plan.plan import Plan
from sojax.programs.live import peak_live_bytes
from sojax.programs.spec import Targets
from sojax.runtime.setup import make_setup

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
SIZE = 8 * 16 * 4


def peak(function, *args, **kwargs):
  return peak_live_bytes(jax.make_jaxpr(function)(*args).jaxpr, **kwargs)


def test_arguments_and_results_do_not_count():
  assert peak(jnp.sin, X) == 0


def test_a_value_lives_until_its_last_use():
  def f(x):
    a = jnp.sin(x)
    b = jnp.cos(a)  # a and b
    c = jnp.exp(b)  # a, b and c
    return jnp.tan(a) + c

  assert peak(f, X) == 3 * SIZE


def test_a_value_is_gone_after_its_last_use():
  def f(x):
    for _ in range(5):
      x = jnp.sin(x)
    return x

  assert peak(f, X) == 2 * SIZE


@pytest.mark.parametrize(
  "view",
  [
    lambda x: x.reshape(16, 8),
    lambda x: x[None],
    lambda x: jnp.broadcast_to(x[None], (100, 8, 16)),
    jax.lax.optimization_barrier,
  ],
)
def test_views_have_no_bytes_but_keep_their_operand_alive(view):
  def f(x, reads_operand):
    a = jnp.sin(x)
    viewed = view(a)
    b = jnp.exp(jnp.cos(x))  # its operand, and a
    total = jnp.sum(viewed) + jnp.sum(b)
    return total + jnp.sum(a) if reads_operand else total

  for reads_operand in (True, False):
    assert peak(functools.partial(f, reads_operand=reads_operand), X) == (
      3 * SIZE
    )


def test_constants_that_are_spread_are_free():
  assert peak(lambda x: x + jnp.zeros((8, 16)), X) == 0


def test_a_loop_takes_what_its_body_takes_once():
  def body(carry, _):
    return jnp.sin(jnp.cos(jnp.exp(carry))), None

  def f(x):
    a = jnp.tan(x)
    return jax.lax.scan(body, a, length=7)[0] + a

  # `a`, the loop's result, and two values of the body.
  assert peak(f, X) == 4 * SIZE


def test_of_branches_the_largest_counts():
  def f(i, x):
    return jax.lax.cond(i > 0, jnp.sin, lambda y: jnp.exp(jnp.cos(y)), x)

  index = jax.ShapeDtypeStruct((), jnp.int32)
  assert SIZE <= peak(f, index, X) <= SIZE + 8


def test_elements_count_as_many_bytes_as_asked_for():
  half = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)

  def f(x):
    return jnp.sin(jnp.cos(x))

  assert peak(f, half) == SIZE // 2
  assert peak(f, half, min_itemsize=4) == SIZE


def test_keys_have_no_bytes():
  key = jax.eval_shape(lambda: jax.random.key(0))
  assert peak(lambda k: jax.random.key_data(jax.random.split(k)[0]), key) < 64


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1024), (4, 256)])
def test_compiled_backwards_take_between_half_and_all_of_it(rows, tokens):
  shape = models.presets.gpt("25m")
  model = models.GPT(
    dataclasses.replace(shape, num_layers=2, vocab_size=4096),
    rngs=nnx.Rngs(0),
  )
  config = sojax.TrainConfig(micro_batch=rows, seq_len=tokens)
  made = make_setup(
    model, sojax.adamw(1e-3), config, Plan(), None, nnx.Param, None
  )
  compiled = {
    stage: _backward(made, stage).compile().memory_analysis()
    for stage in (0, 1, 3)  # 1 and 2 are equal
  }
  for stage, memory in compiled.items():
    bound = made.workload.stages[stage].temp_bytes
    assert memory.temp_size_in_bytes <= bound
  most = max(memory.temp_size_in_bytes for memory in compiled.values())
  assert most <= made.workload.temp_bytes <= 2 * most


def test_compiled_backwards_take_and_return_what_is_accounted_for():
  """To the byte: weights and two activations in, gradients and one out."""
  model = models.GPT(
    models.GPTConfig(
      vocab_size=512, num_layers=2, hidden_dim=64, num_heads=2, max_seq_len=32
    ),
    rngs=nnx.Rngs(0),
  )
  config = sojax.TrainConfig(micro_batch=2, seq_len=24)
  made = make_setup(
    model,
    sojax.adamw(1e-3),
    config,
    Plan(),
    None,
    nnx.Param,
    None,
  )
  (dx_bytes,) = {made.workload.stages[stage].input_bytes for stage in (1, 2, 3)}
  for stage in (1, 2):
    memory = _backward(made, stage).compile().memory_analysis()
    elems = sum(bucket.size for bucket in made.layout.of_stage(stage))
    added_last = 64  # a bias, which is not needed again
    assert (
      memory.argument_size_in_bytes == 4 * (elems - added_last) + 2 * dx_bytes
    )
    leaves = len(made.split.used[stage])
    outputs = 3  # the gradients in one wire unit, dx, the leaves' squares
    assert (
      memory.output_size_in_bytes
      == 4 * elems + dx_bytes + 4 * leaves + 8 * outputs
    )
    assert memory.alias_size_in_bytes == dx_bytes  # dx is where dy was


def _backward(made, stage):
  """Lowers the backward of a stage of a model with tied embeddings."""
  config, leaves = made.config, made.layout.model.leaves
  rows = config.micro_batch, config.seq_len
  params = [
    jax.ShapeDtypeStruct(leaves[i].shape, jnp.float32)
    for i in made.split.used[stage]
  ]
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  hidden = jax.ShapeDtypeStruct((*rows, leaves[0].shape[1]), jnp.float32)
  tokens = jax.ShapeDtypeStruct(rows, jnp.int32)
  mask = jax.ShapeDtypeStruct(rows, jnp.float32)
  last = stage == made.layout.model.num_stages - 1
  return made.programs[stage].finish.lower(
    params,
    made.split.other[stage],
    tokens if stage == 0 else hidden,
    Targets(tokens, mask, scalar, scalar) if last else hidden,
    {0: [params[0]]} if stage == 0 else {},
    (),
    None,
  )
