"""sojax: SuperOffload for JAX. Trains models that are larger than the GPU."""

from sojax import models
from sojax.checkpoint import CheckpointError
from sojax.host.kernels import CpuInfo, cpu_info
from sojax.plan.adamw import AdamW, adamw, partition
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan
from sojax.runtime.run import StepError
from sojax.trainer import Trainer

__all__ = [
  "AdamW",
  "CheckpointError",
  "CpuInfo",
  "Plan",
  "StepError",
  "TrainConfig",
  "Trainer",
  "adamw",
  "cpu_info",
  "models",
  "partition",
]
