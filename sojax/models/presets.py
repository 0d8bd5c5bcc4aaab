"""Named model shapes.

From "1b" on these are the shapes of the SuperOffload artifact (arXiv
2509.21271), named by how many parameters they have; "200b" is one of our own of
the size that the paper names. Three have another name in the artifact and an
alias for it, see `ALIASES`. The smaller ones are GPT-2's shapes and two
byte-level models for experiments on a CPU.
"""

from collections.abc import Mapping
from types import MappingProxyType

from sojax.models.gpt import GPTConfig

_VOCAB_SIZE = 50304  # GPT-2's 50,257, padded to a multiple of 128
_MAX_SEQ_LEN = 1024


def _artifact(num_layers: int, hidden_dim: int) -> GPTConfig:
  """Returns a config with the artifact's vocabulary, heads and length."""
  return GPTConfig(
    vocab_size=_VOCAB_SIZE,
    num_layers=num_layers,
    hidden_dim=hidden_dim,
    num_heads=max(32, hidden_dim // 128),
    max_seq_len=_MAX_SEQ_LEN,
  )


def _small(
  vocab_size: int,
  num_layers: int,
  hidden_dim: int,
  *,
  max_seq_len: int = _MAX_SEQ_LEN,
) -> GPTConfig:
  """Returns a config with heads of 64, as in GPT-2."""
  return GPTConfig(
    vocab_size=vocab_size,
    num_layers=num_layers,
    hidden_dim=hidden_dim,
    num_heads=hidden_dim // 64,
    max_seq_len=max_seq_len,
  )


_PRESETS = {
  "bytes": _small(256, 4, 256, max_seq_len=256),
  "25m": _small(256, 8, 512),
  "125m": _small(_VOCAB_SIZE, 12, 768),
  "350m": _small(_VOCAB_SIZE, 24, 1024),
  "760m": _small(_VOCAB_SIZE, 36, 1280),
  "1b": _artifact(20, 2048),
  "2b": _artifact(40, 2048),
  "3b": _artifact(60, 2048),
  "3.5b": _artifact(70, 2048),
  "4b": _artifact(64, 2304),
  "5b": _artifact(44, 3072),
  "6b": _artifact(53, 3072),
  "8b": _artifact(72, 3072),
  "10b": _artifact(50, 4096),
  "13b": _artifact(65, 4096),
  "15b": _artifact(18, 8192),
  "18b": _artifact(90, 4096),
  "20b": _artifact(25, 8192),
  "25b": _artifact(30, 8192),
  "30b": _artifact(36, 8192),
  "50b": _artifact(60, 8192),
  "65b": _artifact(20, 16384),
  "80b": _artifact(100, 8192),
  "145b": _artifact(45, 16384),
  "200b": _artifact(62, 16384),
  "290b": _artifact(90, 16384),
}

ALIASES: Mapping[str, str] = MappingProxyType(
  {
    "70b": "65b",
    "100b": "145b",
    "artifact-70b": "65b",
    "artifact-100b": "145b",
    "artifact-200b": "290b",
  }
)
"""The artifact's names whose number is not the number of parameters.

Its "200b" is only found with the prefix: without it the name is taken by the
preset that has 200 billion parameters.
"""

NAMES: tuple[str, ...] = tuple(_PRESETS)
"""All presets, smallest first, without aliases."""


def gpt(name: str) -> GPTConfig:
  """Returns the config of a preset or of an alias of one.

  Use `dataclasses.replace` for another sequence length, dropout or attention.

  Args:
    name: one of `NAMES` or `ALIASES`.

  Raises:
    ValueError: if there is no such preset.

  Examples:
    >>> gpt("25b").hidden_dim
    8192
    >>> num_params(gpt("125m"))
    124475904
  """
  config = _PRESETS.get(ALIASES.get(name, name))
  if config is None:
    raise ValueError(
      f"there is no preset {name!r}; choose one of"
      f" {', '.join((*NAMES, *ALIASES))}"
    )
  return config


def num_params(config: GPTConfig) -> int:
  """Returns the number of parameters of a GPT, a tied head counted once."""
  D = config.hidden_dim
  F = config.mlp_ratio * D
  attention = D * 3 * D + 3 * D + D * D + D
  mlp = D * F + F + F * D + D
  norm = 2 * D
  embeddings = (config.vocab_size + config.max_seq_len) * D
  head = norm + (0 if config.tie_head else config.vocab_size * D)
  return embeddings + config.num_layers * (attention + mlp + 2 * norm) + head
