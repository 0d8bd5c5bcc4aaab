"""Floating-point operations of a model, by its shape."""

from sojax import models


def train_flops_per_token(config: models.GPTConfig, seq_len: int) -> int:
  """Counts a training step's operations per token, without recomputation.

  Six for each weight that multiplies (embedding lookups and norms do not),
  and 12 * seq_len * hidden_dim for the attention of each block, not halved
  for its mask: the count of PaLM (arXiv 2204.02311, appendix B).

  Args:
    config: the model's shape.
    seq_len: tokens of a sequence.
  """
  block_weights = (4 + 2 * config.mlp_ratio) * config.hidden_dim**2
  head_weights = config.vocab_size * config.hidden_dim
  weights = config.num_layers * block_weights + head_weights
  attention = config.num_layers * seq_len * config.hidden_dim
  return 6 * weights + 12 * attention
