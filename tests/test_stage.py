"""What the stages of a model are; what they compute is in test_gpt."""

import pytest
from flax import nnx

from sojax.models.gpt import GPTConfig, abstract_gpt
from sojax.models.stage import Stage, stages_of


@pytest.mark.parametrize("name", ["", "block.0"])
def test_name_without_dot_is_asked_for(name):
  with pytest.raises(ValueError, match="must be non-empty and have no dot"):
    Stage(name=name, module=nnx.Linear(1, 1, rngs=nnx.Rngs(0)))


def test_a_model_names_its_stages():
  config = GPTConfig(
    vocab_size=5, num_layers=1, hidden_dim=4, num_heads=1, max_seq_len=3
  )
  stages = stages_of(abstract_gpt(config))
  assert [stage.name for stage in stages] == ["embed", "block_0", "head"]


def test_a_model_without_stages_is_one():
  model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
  model.stages = "not a method"
  (stage,) = stages_of(model)
  assert stage.module is model
