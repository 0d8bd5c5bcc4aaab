"""Oracle: the shapes of an abstract model, and the paper's table."""

import dataclasses
import math

import jax
import pytest
from flax import nnx

from sojax.models import presets
from sojax.models.gpt import abstract_gpt

# Layers, hidden size and, in billions, the count that the artifact names.
ARTIFACT = {
  "1b": (20, 2048, 1),
  "2b": (40, 2048, 2),
  "3b": (60, 2048, 3),
  "3.5b": (70, 2048, 3.5),
  "4b": (64, 2304, 4),
  "5b": (44, 3072, 5),
  "6b": (53, 3072, 6),
  "8b": (72, 3072, 8),
  "10b": (50, 4096, 10),
  "13b": (65, 4096, 13),
  "15b": (18, 8192, 15),
  "18b": (90, 4096, 18),
  "20b": (25, 8192, 20),
  "25b": (30, 8192, 25),
  "30b": (36, 8192, 30),
  "50b": (60, 8192, 50),
  "artifact-70b": (20, 16384, 65),
  "80b": (100, 8192, 80),
  "artifact-100b": (45, 16384, 145),
  "200b": (62, 16384, 200),
  "artifact-200b": (90, 16384, 290),
}


def counted_params(config):
  """Counts the elements of all parameters, a shared one once."""
  params = nnx.state(abstract_gpt(config), nnx.Param)
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["bytes", "25m", "125m", "1b", "25b"])
def test_num_params_equals_the_abstract_models(name):
  config = presets.gpt(name)
  assert presets.num_params(config) == counted_params(config)


def test_num_params_counts_an_untied_head_and_another_mlp_ratio():
  config = dataclasses.replace(
    presets.gpt("bytes"), tie_head=False, mlp_ratio=3, max_seq_len=99
  )
  assert presets.num_params(config) == counted_params(config)


def test_artifact_presets_have_the_papers_shapes_and_counts():
  for name, (num_layers, hidden_dim, billions) in ARTIFACT.items():
    config = presets.gpt(name)
    assert (config.num_layers, config.hidden_dim) == (num_layers, hidden_dim)
    assert config.num_heads == max(32, hidden_dim // 128)
    assert config.vocab_size == 50304
    # Names are rounded; 1b has the largest share of embeddings, 11 %.
    assert presets.num_params(config) / 1e9 == pytest.approx(billions, rel=0.12)


def test_every_name_states_its_count():
  for name in presets.NAMES:
    if name != "bytes":
      unit = {"m": 1e6, "b": 1e9}[name[-1]]
      count = presets.num_params(presets.gpt(name))
      assert count / unit == pytest.approx(float(name[:-1]), rel=0.12)
  assert 3e6 <= presets.num_params(presets.gpt("bytes")) <= 5e6


def test_names_are_sorted_by_count():
  counts = [presets.num_params(presets.gpt(name)) for name in presets.NAMES]
  assert counts == sorted(counts)


def test_aliases_are_no_names_and_lead_to_names():
  assert not set(presets.ALIASES) & set(presets.NAMES)
  assert set(presets.ALIASES.values()) <= set(presets.NAMES)
  assert presets.gpt("100b") == presets.gpt("145b")


def test_unknown_name_lists_the_known_ones():
  with pytest.raises(ValueError, match="no preset '7b'; choose .* 6b, 8b"):
    presets.gpt("7b")
