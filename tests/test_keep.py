"""Programs of stages that keep their activations: what forward leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sojax.cluster.mesh import Placement
from sojax.plan.plan import Plan
from sojax.programs.keep import KeepPrograms, make_keep_programs
from sojax.programs.spec import Position, StageSpec
from sojax.programs.split_model import StageParts
from sojax.programs.stages import StagePrograms
from tests.training import small_gpt, trainer

PLACEMENT = Placement.of(None)
B, T, D = 4, 8, 16


class Plain(nnx.Module):
  """y = x @ w + x."""

  def __init__(self):
    self.w = nnx.Param(jax.random.normal(jax.random.key(0), (D, D)))

  def __call__(self, x):
    return x @ self.w[...] + x


class Transposed(Plain):
  """The residuals are x and a weight that forward has transposed."""

  def __call__(self, x):
    return x @ self.w[...].T + x


class Exponential(Plain):
  """The output is a residual, too."""

  def __call__(self, x):
    return jnp.exp(0.1 * (x @ self.w[...]))


class Masked(Plain):
  """The dropout mask is a residual, which depends on other state."""

  def __init__(self):
    super().__init__()
    self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

  def __call__(self, x):
    return self.dropout(x @ self.w[...])


class Nothing(nnx.Module):
  """No parameters and no residuals."""

  def __call__(self, x):
    return 2.0 * x


def put(x):
  return jax.device_put(x, PLACEMENT.device)


def make(module):
  """Returns spec, parameters and other state of a middle stage."""
  graphdef, params, rest = nnx.split(module, nnx.Param, ...)
  leaves = jax.tree.leaves(params)
  spec = StageSpec(
    parts=StageParts(
      graphdef, jax.tree.structure(params), jax.tree.structure(rest)
    ),
    position=Position.MIDDLE,
    loss=None,
    trained=tuple(range(len(leaves))),
    tied=(),
    units=(),
    num_on_host=0,
    accumulate="device",
    grad_dtype="float32",
    transport="dma",
    reuses_dy=False,
    working_dtype="float32",
  )
  other = tuple(put(x) for x in jax.tree.leaves(rest))
  return spec, tuple(put(p) for p in leaves), other


def inputs():
  rng = np.random.default_rng(0)
  x, dy = rng.standard_normal((2, B, T, D)).astype(np.float32)
  return put(x), put(dy)


@pytest.mark.parametrize(
  ("module", "num_arrays", "holds_x", "holds_y"),
  [
    (Plain, 0, True, False),
    (Transposed, 0, True, False),
    (Exponential, 0, True, True),
    (Masked, 1, True, False),
    (Nothing, 0, False, False),
  ],
)
def test_forward_copies_out_only_what_nobody_else_has(
  module, num_arrays, holds_x, holds_y
):
  spec, params, other = make(module())
  x, _ = inputs()
  y, _, kept = KeepPrograms(spec, PLACEMENT).forward(params, other, x)
  assert [a.shape for a in kept.arrays] == [(B, T, D)] * num_arrays
  _, _, held_x, held_y = kept.with_held(other, x, y)
  assert held_x is (x if holds_x else None)
  assert held_y is (y if holds_y else None)


@pytest.mark.parametrize(
  "module", [Plain, Transposed, Exponential, Masked, Nothing]
)
@pytest.mark.parametrize("last_micro", [False, True])
def test_gradients_are_those_of_recomputation(module, last_micro):
  """Oracle: the backward that recomputes. Each element is a sum of at most
  B * T rounded products, compared with the largest of its array."""
  spec, params, other = make(module())
  x, dy = inputs()
  keeping, recomputing = (
    KeepPrograms(spec, PLACEMENT),
    StagePrograms(spec, PLACEMENT),
  )
  y, new_other, kept = keeping.forward(params, other, x)
  expected_y, expected_other = recomputing.forward(params, other, x)
  left = kept.with_held(other, x, y)
  name = "finish" if last_micro else "add"
  ours = getattr(keeping, name)(params, *left, dy, {}, (), None)
  theirs = getattr(recomputing, name)(params, other, x, dy, {}, (), None)
  for a, b in zip(
    jax.tree.leaves((y, ours)),
    jax.tree.leaves((expected_y, theirs)),
    strict=True,
  ):
    bound = B * T * 2.0**-24 * np.abs(b).max(initial=0.0)
    assert np.all(np.abs(a - b) <= bound)
  for a, b in zip(new_other, expected_other, strict=True):
    assert jnp.all(a == b)


def compiled(ours, stage):
  """Returns what GPT's programs of a stage compile to, keeping or not."""
  keeping = ours._parts.compute._keep_programs[stage]
  recomputing = ours._parts.compute._programs[stage]
  params = tuple(
    jax.ShapeDtypeStruct(ours.layout.model.leaves[i].shape, np.float32)
    for i in ours._setup.split.used[stage]
  )
  x = jax.ShapeDtypeStruct((16, 24, 64), np.float32)
  y, _, kept = keeping.forward.eval_shape(params, (), x)
  left = kept.with_held((), x, y)
  return {
    "forward": recomputing.forward.lower(params, (), x),
    "recompute": recomputing.finish.lower(params, (), x, x, {}, (), None),
    "keep_forward": keeping.forward.lower(params, (), x),
    "keep": keeping.finish.lower(params, *left, x, {}, (), None),
  }


def test_compiled_programs_neither_recompute_nor_copy_parameters():
  """Recomputation leaves out forward's last product, which no gradient needs:
  it costs more than 0.6 of forward, here 0.72."""
  with trainer({"activations": "keep"}, micro_batch=16) as ours:
    programs = {k: p.compile() for k, p in compiled(ours, 1).items()}
    # Of two equal blocks: embed's only residual is the tokens.
    block_bytes = ours.account.device["residuals"] // 2
  flops = {k: p.cost_analysis()["flops"] for k, p in programs.items()}
  assert flops["keep"] < flops["recompute"] - 0.6 * flops["forward"]
  assert flops["keep_forward"] < 1.1 * flops["forward"]
  out = programs["keep_forward"].memory_analysis().output_size_in_bytes
  y_bytes = 4 * 16 * 24 * 64
  pointers = 8 * 64  # of the tuple that holds the outputs
  assert block_bytes <= out - y_bytes <= block_bytes + pointers
  assert block_bytes > 10 * y_bytes


def test_equal_stages_share_their_programs():
  with trainer({"activations": "keep"}, model=small_gpt(num_layers=3)) as ours:
    keeping = ours._parts.compute._keep_programs
    assert sorted(keeping) == [0, 1, 2, 3]
    assert keeping[1] is keeping[2] is keeping[3]
    named = ("recompute", "offload", "keep", "keep", "keep")
    some = make_keep_programs(
      ours._parts.compute._programs, Plan(activations=named), PLACEMENT
    )
    assert sorted(some) == [2, 3]


def test_what_forward_leaves_is_the_same_for_every_call():
  """Or backward would be compiled for each."""
  spec, params, other = make(Masked())
  x, _ = inputs()
  programs = [KeepPrograms(spec, PLACEMENT) for _ in range(2)]
  first, second = (p.forward(params, other, x)[2].residuals for p in programs)
  assert first == second and hash(first) == hash(second)
  assert dataclasses.replace(first, sources=()) != second
