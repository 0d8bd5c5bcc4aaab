"""What stages compute, against closed forms, and against real set-ups."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import sojax
from sojax.models import presets
from sojax.models.attention import _block_tokens
from sojax.models.gpt import GPT
from sojax.models.stage import Stage
from sojax.plan.buckets import ModelShape
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan
from sojax.programs import workload as workload_lib
from sojax.programs.split_model import split_model
from sojax.programs.trace import trace_stages
from sojax.programs.workload import gpt_workload
from sojax.runtime.setup import make_setup
from tests.training import config, mesh_of, optimizer, small_gpt

BF16 = TrainConfig(micro_batch=2, seq_len=1024, precision="bf16")


def preset_workload(name, train_config=BF16, num_ranks=1):
  return gpt_workload(
    presets.gpt(name), train_config, sojax.adamw(1e-3), num_ranks
  )


def setup(model=None, plan=None, mesh=None, **changes):
  return make_setup(
    model or small_gpt(),
    optimizer(),
    config(**changes),
    plan or Plan(),
    mesh,
    nnx.Param,
    None,
  )


@pytest.mark.parametrize("name", ["125m", "1b", "25b"])
def test_flops_of_a_gpt_are_those_of_the_closed_form(name):
  shape = presets.gpt(name)
  B, S, D, V = 2, 1024, shape.hidden_dim, shape.vocab_size
  block = _block_tokens(S)
  # Pairs of a query and a key in blocks on the diagonal and below it.
  pairs = B * S * (S + block) / 2
  embed, first, *_, last_block, head = preset_workload(name).stages
  assert (embed.forward_flops, embed.backward_flops) == (0, 0)
  assert first == last_block
  linear = 24 * B * S * D**2  # 12 D^2 weights
  assert first.forward_flops == linear + 4 * pairs * D
  # Backward of attention computes the scores once more: five products for two.
  assert first.backward_flops == 2 * linear + 10 * pairs * D
  # Recomputing leaves out the last linear layer, whose result nothing needs.
  assert first.recompute_flops == linear - 8 * B * S * D**2 + 4 * pairs * D
  assert head.forward_flops == 2 * B * S * D * V
  assert head.backward_flops == 4 * B * S * D * V


def test_a_workload_has_the_parameters_and_inputs_of_its_model():
  work = preset_workload("1b")
  count = sum(leaf.size for leaf in work.model.leaves)
  assert count == presets.num_params(presets.gpt("1b"))
  tokens, *inputs = work.input_bytes
  assert tokens == 4 * 2 * 1024
  assert set(inputs) == {2 * 2 * 1024 * 2048}
  assert sorted(work.backward_order) == [*range(len(work.model.leaves))]
  assert work.needs == ()


def test_bytes_of_a_block_are_those_of_its_products_at_least():
  shape = presets.gpt("1b")
  D, tokens = shape.hidden_dim, 2 * 1024
  block = preset_workload("1b").stages[1]
  weights = 2 * 12 * D**2
  activations = 2 * tokens * D * (1 + 3 + 1 + 1 + 1 + 4 + 4 + 1)
  assert block.forward_bytes >= weights + activations
  assert block.forward_bytes < 2 * (weights + activations)
  # Weights again, and their gradients; activations and their gradients.
  assert block.backward_bytes >= 2 * weights + activations
  assert block.backward_bytes < 6 * (weights + activations)


def test_the_largest_model_traces_each_distinct_stage_once(monkeypatch):
  calls = []
  count = workload_lib.count_flops
  monkeypatch.setattr(
    workload_lib, "count_flops", lambda jaxpr: calls.append(1) or count(jaxpr)
  )
  train_config = dataclasses.replace(BF16, micro_batch=3)
  work = preset_workload("200b", train_config, num_ranks=16)
  assert len(work.stages) == 64
  assert len(calls) <= 3 * 3  # of the first, the blocks and the last
  assert sum(leaf.size for leaf in work.model.leaves) == presets.num_params(
    presets.gpt("200b")
  )
  assert len(work.needs) == 64


class Products(nnx.Module):
  """Two products of one shape, in one order or the other."""

  def __init__(self, first_is_a):
    self.a, self.b = nnx.Param(jnp.eye(32)), nnx.Param(jnp.eye(32))
    self.first_is_a = first_is_a

  def __call__(self, x):
    weights = [self.a, self.b] if self.first_is_a else [self.b, self.a]
    for weight in weights:
      x = jnp.tanh(x @ weight[...])
    return x


def test_stages_of_equal_shapes_are_traced_apart_if_they_compute_otherwise():
  class Model(nnx.Module):
    def __init__(self):
      self.embed = nnx.Embed(256, 32, rngs=nnx.Rngs(0))
      self.a, self.b = Products(True), Products(False)

    def stages(self):
      modules = {"embed": self.embed, "a": self.a, "b": self.b}
      return [Stage(name=x, module=module) for x, module in modules.items()]

  split = split_model(Model(), optimizer(), loss=lambda y, *_: y.sum())
  _, a, b = trace_stages(split, "float32", (2, 8))
  # Backward finishes first what forward used last; places are by name.
  assert (a.backward_order, b.backward_order) == ((1, 0), (0, 1))


def test_a_backward_needs_no_weights_of_which_only_the_output_is_made():
  work = preset_workload("125m", num_ranks=4)
  names = [leaf.name for leaf in work.model.leaves]
  left_out = {
    names[leaf] for leaf in work.needs[1].forward - work.needs[1].backward
  }
  assert left_out == {"block_0.mlp.down.bias"}
  assert work.needs[-1].forward == frozenset()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_set_up_has_the_workload_of_the_abstract_model(precision):
  model = small_gpt()
  train_config = config(precision=precision)
  ours = gpt_workload(model.config, train_config, sojax.adamw(1e-3))
  theirs = setup(model, precision=precision).workload
  assert isinstance(theirs.model, ModelShape)
  assert ours.stages == theirs.stages
  assert ours.backward_order == theirs.backward_order
  shapes = [leaf.shape for leaf in ours.model.leaves]
  assert shapes == [leaf.shape for leaf in theirs.model.leaves]


def test_kept_bytes_are_those_of_what_forward_returns():
  made = setup(plan=Plan(activations="keep"))
  residuals = 0
  for stage, programs in made.keep_programs.items():
    work = made.workload.stages[stage]
    params = [
      made.split.shape.leaves[leaf].shape for leaf in made.split.used[stage]
    ]
    x = (4, 24) if stage == 0 else (4, 24, 64)
    _, _, kept = programs.forward.eval_shape(
      [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in params],
      made.split.other[stage],
      jax.ShapeDtypeStruct(x, jnp.int32 if stage == 0 else jnp.float32),
    )
    own = sum(math.prod(x.shape) * x.dtype.itemsize for x in kept.arrays)
    assert work.kept_bytes == own
    residuals += own
  assert residuals > 0
  assert made.account.device["residuals"] == residuals


def test_ranks_change_needs_and_what_is_gathered_only():
  alone, two = setup(), setup(mesh=mesh_of(2))
  model = alone.workload.model
  for stage, (a, b) in enumerate(
    zip(alone.workload.stages, two.workload.stages, strict=True)
  ):
    elems = sum(model.leaves[leaf].size for leaf in model.used(stage))
    # Weights, and gradients before they are added up, in float32 here.
    gathered = (4 + 4) * elems
    assert b == dataclasses.replace(a, temp_bytes=a.temp_bytes + gathered)
  assert len(two.workload.needs) == 4 and alone.workload.needs == ()


def test_a_model_of_one_stage_counts_forward_and_backward_apart():
  class Whole(nnx.Module):
    """A GPT without stages."""

    vocab_size = 256

    def __init__(self):
      self.model: GPT = small_gpt(attention="blockwise")

    def __call__(self, tokens):
      return self.model(tokens)

  (only,) = setup(Whole()).workload.stages
  stages = setup(small_gpt(attention="blockwise")).workload.stages
  assert only.forward_flops == sum(x.forward_flops for x in stages)
  assert only.backward_flops == sum(x.backward_flops for x in stages)
  assert only.kept_bytes == 0


def test_a_sequence_too_long_for_the_model_is_refused():
  with pytest.raises(ValueError, match="longer than max_seq_len=1024"):
    preset_workload("125m", dataclasses.replace(BF16, seq_len=1025))
