"""What a trainer is made for, found before anything is allocated."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from sojax.cluster.mesh import Placement
from sojax.graph.graph import StepGraph
from sojax.graph.schedule import schedule
from sojax.host.python_sink import check_num_devices
from sojax.models.loss import Loss
from sojax.plan.account import Account, make_account
from sojax.plan.adamw import Optimizer
from sojax.plan.buckets import Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan
from sojax.plan.workload import Workload
from sojax.programs.keep import KeepPrograms, make_keep_programs
from sojax.programs.split_model import SplitModel, split_model
from sojax.programs.stages import StagePrograms, make_stage_programs
from sojax.programs.trace import trace_stages
from sojax.programs.workload import trace_workload


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
  """A model taken apart, and the way it is trained.

  Attributes:
    config: what is trained.
    plan: how a step is carried out.
    placement: the mesh.
    split: the model taken apart.
    workload: what it asks of the machine.
    layout: the model cut into buckets.
    graph: the tasks of a step.
    programs: the programs of each stage.
    keep_programs: those of the stages that keep their activations.
    account: bytes that the plan takes on host and device.
  """

  config: TrainConfig
  plan: Plan
  placement: Placement
  split: SplitModel
  workload: Workload
  layout: Layout
  graph: StepGraph
  programs: Sequence[StagePrograms]
  keep_programs: Mapping[int, KeepPrograms]
  account: Account


def make_setup(
  model: nnx.Module,
  optimizer: Optimizer,
  config: TrainConfig,
  plan: Plan,
  mesh: Mesh | None,
  trainable: Any,
  loss: Loss | None,
) -> Setup:
  """Takes a model apart, cuts it into buckets and schedules its step.

  Args:
    model: see `sojax.Trainer`, like all arguments.
    optimizer: its hyper-parameters.
    config: what is trained.
    plan: how.
    mesh: where.
    trainable: filter of what is trained.
    loss: the loss, if it is not the model's own.

  Raises:
    ValueError: for anything that does not fit together.
  """
  placement = Placement.of(mesh)
  split = split_model(model, optimizer, trainable, loss)
  batch_shape = config.micro_batch, config.seq_len
  shapes = trace_stages(split, config.working_dtype, batch_shape)
  workload = trace_workload(
    split, shapes, config.working_dtype, placement.num_devices
  )
  layout = workload.layout(plan, config)
  if plan.transport(layout.model.num_stages) == "io_callback":
    check_num_devices(placement.num_devices)
  graph = schedule(layout, plan, config, workload.input_bytes)
  programs = make_stage_programs(split, layout, shapes, plan, config, placement)
  keep_programs = make_keep_programs(programs, plan, placement)
  account = make_account(
    layout,
    plan,
    config,
    workload.input_bytes,
    {stage: workload.stages[stage].kept_bytes for stage in keep_programs},
    workload.needs,
  )
  return Setup(
    config=config,
    plan=plan,
    placement=placement,
    split=split,
    workload=workload,
    layout=layout,
    graph=graph,
    programs=programs,
    keep_programs=keep_programs,
    account=account,
  )
