"""A model taken apart: leaves, ties, groups. Oracle: the model's own Params."""

import jax
import numpy as np
import pytest
from flax import nnx

import sojax
from sojax.host.casts import SeparatelyCastBucket
from sojax.models.gpt import abstract_gpt
from sojax.models.presets import gpt
from sojax.plan.account import make_account
from sojax.plan.buckets import plan_buckets
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan
from sojax.programs.split_model import split_model
from tests.training import decayed, live_arrays_besides, small_gpt


def test_every_param_is_one_leaf_and_keeps_its_object():
  model = small_gpt()
  split = split_model(model, sojax.adamw(1e-3))
  own = {id(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Param)}
  assert {id(p) for p in split.params} == own
  assert len(split.params) == len(own) == len(split.shape.leaves)
  names = [leaf.name for leaf in split.shape.leaves]
  assert len(set(names)) == len(names)
  for leaf, param in zip(split.shape.leaves, split.params, strict=True):
    assert leaf.shape == param.shape


def test_a_tied_weight_belongs_to_the_earliest_stage():
  split = split_model(small_gpt(), sojax.adamw(1e-3))
  names = [leaf.name for leaf in split.shape.leaves]
  table = names.index("embed.tokens")
  assert split.shape.borrowed == ((), (), (), (table,))
  assert "head.table" not in names
  assert table in split.used[-1]
  untied = split_model(small_gpt(tie_head=False), sojax.adamw(1e-3))
  assert untied.shape.borrowed == ((),) * 4


def test_equal_blocks_have_equal_parts():
  for dropout in (0.0, 0.1):
    split = split_model(small_gpt(dropout=dropout), sojax.adamw(1e-3))
    assert split.parts[1] == split.parts[2]
    assert hash(split.parts[1]) == hash(split.parts[2])
    assert split.parts[0] != split.parts[1]


def test_groups_follow_masks_and_labels():
  model = small_gpt()
  masked = split_model(model, sojax.adamw(1e-3, mask=decayed)).shape
  assert {g.weight_decay for g in masked.groups} == {1e-4, 0.0}
  for leaf in masked.leaves:
    assert masked.groups[leaf.group].weight_decay == (
      1e-4 if len(leaf.shape) > 1 else 0.0
    )
  tree = jax.tree.map(lambda x: x.ndim == 1, nnx.state(model, nnx.Param))
  by_tree = split_model(model, sojax.adamw(1e-3, mask=tree)).shape
  for leaf in by_tree.leaves:
    assert by_tree.groups[leaf.group].weight_decay == (
      1e-4 if len(leaf.shape) == 1 else 0.0
    )
  one = split_model(model, sojax.adamw(1e-3, mask=False)).shape
  assert [g.weight_decay for g in one.groups] == [0.0]


def test_trainable_filters_see_paths_in_the_model():
  split = split_model(
    small_gpt(), sojax.adamw(1e-3), nnx.PathContains("blocks")
  )
  for leaf in split.shape.leaves:
    assert leaf.trained == leaf.name.startswith("block_")


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("preset", ["25b", "200b"])
def test_a_preset_larger_than_any_memory_is_planned_without_any(preset):
  before = len(jax.live_arrays())
  config = gpt(preset)
  split = split_model(abstract_gpt(config), sojax.adamw(1e-4, mask=decayed))
  layout = plan_buckets(split.shape, bucket_bytes=64 << 20, elem_bytes=2)
  num_params = sum(leaf.size for leaf in layout.model.leaves)
  assert sum(bucket.size for bucket in layout.buckets) == num_params
  account = make_account(
    layout,
    Plan(weights="flow"),
    TrainConfig(micro_batch=1, seq_len=2048, precision="bf16"),
    [2048 * config.hidden_dim * 2] * layout.model.num_stages,
    {},
  )
  assert account.host["masters"] + account.host["moments"] == 12 * num_params
  assert account.host["working_copy"] == 2 * num_params
  assert len(jax.live_arrays()) <= before


def wide_of(bucket):
  """Returns the arrays that a host bucket's gradients are widened to."""
  separate = isinstance(bucket, SeparatelyCastBucket)
  return (bucket._wide or []) if separate else []


def bytes_spanned(arrays):
  """Returns the bytes between the ends of arrays that may share memory."""
  starts = [x.ctypes.data for x in arrays]
  ends = [x.ctypes.data + x.nbytes for x in arrays]
  return max(ends, default=0) - min(starts, default=0)


@pytest.mark.usefixtures("no_garbage")
def test_the_account_is_that_of_the_arrays():
  """Oracle: the arrays that a Trainer allocates, counted one by one."""
  for plan in (
    {"bucket_bytes": 1 << 16},
    {"bucket_bytes": 1 << 16, "ring_slots": 1},
    {"weights": "flow", "bucket_bytes": 1 << 16, "weight_cast": "device"},
    {"bucket_bytes": 1 << 16, "device_buckets": 3},
    {"bucket_bytes": 1 << 16, "grad_cast": "host_separate"},
  ):
    model = small_gpt(vocab_size=1000)
    config = TrainConfig(micro_batch=2, seq_len=8, precision="bf16")
    before = jax.live_arrays()
    with sojax.Trainer(model, sojax.adamw(1e-3), config, plan) as ours:
      new = live_arrays_besides(before)
      host, device = ours.account.host, ours.account.device
      buckets = ours._state.host.values()
      assert host["masters"] == sum(b.masters.array.nbytes for b in buckets)
      moments = sum(x.nbytes for b in buckets for x in b.moments.values())
      assert host["moments"] == moments
      pinned = [x for x in new if x.sharding.memory_kind == "pinned_host"]
      assert host["ring"] + host["working_copy"] == sum(
        x.nbytes for x in pinned
      )
      wide = [x for b in buckets for xs in wide_of(b) for x in xs]
      assert host["wide_gradients"] == bytes_spanned(wide)
      states = jax.tree.leaves(ours._state.device)
      assert device["device_buckets"] == sum(x.nbytes for x in states)
      num_params = sum(np.prod(p.shape) for p in ours._setup.split.params)
      if "weights" not in plan:
        assert device["weights"] == 2 * num_params
      assert ours.account.host_bytes == sum(host.values())
      assert "host masters" in ours.account.table()
