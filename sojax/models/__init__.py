"""Models, their losses, and the stages in which they are trained."""

from sojax.models import presets
from sojax.models.gpt import GPT, GPTConfig, abstract_gpt
from sojax.models.loss import chunked_cross_entropy, cross_entropy
from sojax.models.stage import Stage, stages_of

__all__ = [
  "GPT",
  "GPTConfig",
  "Stage",
  "abstract_gpt",
  "chunked_cross_entropy",
  "cross_entropy",
  "presets",
  "stages_of",
]
