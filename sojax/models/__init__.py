"""Models, and the protocol by which a model is trained in stages."""

from sojax.models import presets
from sojax.models.gpt import GPT, GPTConfig, abstract_gpt
from sojax.models.loss import chunked_cross_entropy
from sojax.models.stage import Stage, SupportsStages

__all__ = [
  "GPT",
  "GPTConfig",
  "Stage",
  "SupportsStages",
  "abstract_gpt",
  "chunked_cross_entropy",
  "presets",
]
