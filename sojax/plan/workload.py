"""What a model asks of the machine: FLOPs and bytes of each stage."""

import dataclasses

from sojax.plan.buckets import Layout, ModelShape, plan_buckets
from sojax.plan.config import TrainConfig
from sojax.plan.network import Needs
from sojax.plan.plan import Plan, WireDtypes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageWork:
  """What a stage computes, for one micro-batch of one rank.

  Attributes:
    input_bytes: of its input.
    kept_bytes: of what it leaves for backward if it keeps its activations.
    forward_flops: floating-point operations of its forward.
    backward_flops: of its backward alone; those of the last stage's, which is
      its forward too, without forward's.
    recompute_flops: what backward adds to that if it recomputes: those of
      forward that it needs. None stands for all of them.
    forward_bytes: what forward reads and writes of the device's memory.
    backward_bytes: what backward does, likewise.
    temp_bytes: temporaries of its backward that live at once, at most; see
      `sojax.programs.live`.
  """

  input_bytes: int
  kept_bytes: int
  forward_flops: float
  backward_flops: float
  forward_bytes: float
  backward_bytes: float
  recompute_flops: float | None = None
  temp_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """A model and a batch, as planning and simulation see them.

  Attributes:
    model: its stages and parameters.
    backward_order: all parameters; those of each stage as its backward finishes
      them.
    stages: what each one computes.
    needs: which parameters each stage reads; empty on one device.
    num_ranks: devices of the data axis.
  """

  model: ModelShape
  backward_order: tuple[int, ...]
  stages: tuple[StageWork, ...]
  needs: tuple[Needs, ...] = ()
  num_ranks: int = 1

  @property
  def input_bytes(self) -> tuple[int, ...]:
    """Bytes of each stage's input for one micro-batch of one rank."""
    return tuple(stage.input_bytes for stage in self.stages)

  @property
  def temp_bytes(self) -> int:
    """Temporaries of one program, at most; one runs at a time."""
    return max(stage.temp_bytes for stage in self.stages)

  def layout(self, plan: Plan, config: TrainConfig) -> Layout:
    """Cuts the model into the buckets of a plan.

    Raises:
      ValueError: see `plan_buckets`.
    """
    return plan_buckets(
      self.model,
      bucket_bytes=plan.bucket_bytes,
      elem_bytes=WireDtypes.of(plan, config).grad_bytes,
      device_buckets=plan.device_buckets,
      host_ratio=plan.host_ratio,
      num_shards=self.num_ranks,
      backward_order=self.backward_order,
    )
