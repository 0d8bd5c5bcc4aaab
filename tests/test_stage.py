"""A stage's name and the protocol; what stages compute is in test_gpt."""

import pytest
from flax import nnx

from sojax.models.gpt import GPTConfig, abstract_gpt
from sojax.models.stage import Stage, SupportsStages


@pytest.mark.parametrize("name", ["", "block.0"])
def test_name_without_dot_is_asked_for(name):
  with pytest.raises(ValueError, match="must be non-empty and have no dot"):
    Stage(name=name, module=nnx.Linear(1, 1, rngs=nnx.Rngs(0)))


def test_models_with_stages_are_told_from_others():
  config = GPTConfig(
    vocab_size=5, num_layers=1, hidden_dim=4, num_heads=1, max_seq_len=3
  )
  assert isinstance(abstract_gpt(config), SupportsStages)
  assert not isinstance(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), SupportsStages)
