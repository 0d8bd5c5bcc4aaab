"""What a model asks of the machine: counted from traces, computing nothing."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sojax.models import GPTConfig, abstract_gpt
from sojax.models.loss import loss_function
from sojax.plan.adamw import Optimizer
from sojax.plan.config import TrainConfig
from sojax.plan.network import Needs
from sojax.plan.workload import StageWork, Workload
from sojax.programs.count import count_bytes, count_flops, read_arguments
from sojax.programs.keep import run_forward_keeping
from sojax.programs.live import peak_live_bytes
from sojax.programs.spec import Position, StageSpec, Targets
from sojax.programs.split_model import SplitModel, split_model
from sojax.programs.stages import pull_back, run_forward
from sojax.programs.trace import StageShapes, backward_order, trace_stages


def gpt_workload(
  config: GPTConfig,
  train_config: TrainConfig,
  optimizer: Optimizer,
  num_ranks: int = 1,
) -> Workload:
  """Returns what training a GPT asks for, and allocates none of it.

  Attention is counted as blockwise, whatever the config names: that is what
  cuDNN computes as well.

  Args:
    config: the model's shape.
    train_config: what is trained.
    optimizer: its hyper-parameters.
    num_ranks: devices of the data axis.

  Raises:
    ValueError: if the model and the batch do not fit together.
  """
  model = abstract_gpt(dataclasses.replace(config, attention="blockwise"))
  split = split_model(model, optimizer)
  batch_shape = train_config.micro_batch, train_config.seq_len
  shapes = trace_stages(split, train_config.working_dtype, batch_shape)
  return trace_workload(split, shapes, train_config.working_dtype, num_ranks)


def trace_workload(
  split: SplitModel,
  shapes: Sequence[StageShapes],
  working_dtype: str,
  num_ranks: int,
) -> Workload:
  """Counts what each stage computes, moves and reads. Equal stages count once.

  A backward that recomputes needs no weights whose product only the output is:
  what a program does not read, the compiler does not gather; and what it does
  not need, it does not compute.

  Args:
    split: the model, whose parameters may be abstract.
    shapes: what goes into each stage and comes out.
    working_dtype: dtype of parameters on the device.
    num_ranks: devices of the data axis.

  Returns:
    What the model asks of each device; `needs` is empty on one device, where
    nothing is gathered.
  """
  works, needs = [], []
  for stage, x_and_y in enumerate(shapes):
    used = split.used[stage]
    spec = _plain_spec(split, stage, working_dtype)
    leaves = tuple(split.shape.leaves[leaf].shape for leaf in used)
    other = tuple(
      jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
      for leaf in split.other[stage]
    )
    work, places = _count_stage(spec, leaves, other, x_and_y)
    if num_ranks > 1:
      elems = sum(split.shape.leaves[leaf].size for leaf in used)
      # What it gathers, and float32 gradients that are not yet added up.
      whole = (jnp.dtype(working_dtype).itemsize + 4) * elems
      work = dataclasses.replace(work, temp_bytes=work.temp_bytes + whole)
    works.append(work)
    needs.append(Needs(*(frozenset(used[i] for i in read) for read in places)))
  return Workload(
    model=split.shape,
    backward_order=backward_order(split, shapes),
    stages=tuple(works),
    needs=tuple(needs) if num_ranks > 1 else (),
    num_ranks=num_ranks,
  )


def _plain_spec(split: SplitModel, stage: int, working_dtype: str) -> StageSpec:
  """Returns a stage on one device, whose gradients are not cut."""
  model, used = split.shape, split.used[stage]
  borrowed = model.borrowed[stage]
  places = [i for i, leaf in enumerate(used) if model.leaves[leaf].trained]
  position = Position.of(stage, model.num_stages)
  return StageSpec(
    parts=split.parts[stage],
    position=position,
    loss=split.loss if position.is_last else None,
    trained=tuple(i for i in places if used[i] not in borrowed),
    tied=tuple(i for i in places if used[i] in borrowed),
    units=(),
    num_on_host=0,
    accumulate="device",
    grad_dtype=working_dtype,
    transport="dma",
    reuses_dy=False,
    working_dtype=working_dtype,
  )


@functools.lru_cache
def _count_stage(
  spec: StageSpec,
  leaf_shapes: tuple[tuple[int, ...], ...],
  other: tuple[jax.ShapeDtypeStruct, ...],
  shapes: StageShapes,
) -> tuple[StageWork, tuple[frozenset[int], frozenset[int]]]:
  """Counts a stage, and the places of what forward and backward read.

  The last stage's forward reads nothing: it has none of its own.
  """
  dtype = jnp.dtype(spec.working_dtype)
  params = [jax.ShapeDtypeStruct(shape, dtype) for shape in leaf_shapes]
  arguments = params, other, shapes.x
  traces = (_trace_last if spec.position.is_last else _trace_other)(
    spec, arguments, shapes
  )
  both_flops = count_flops(traces.both)
  forward_flops = count_flops(traces.forward)
  forward_bytes = count_bytes(traces.forward)
  if traces.pull is None:
    backward_flops = both_flops - forward_flops
    backward_bytes = max(count_bytes(traces.both) - forward_bytes, 0.0)
    forward_reads: frozenset[int] = frozenset()
  else:
    backward_flops = count_flops(traces.pull)
    backward_bytes = count_bytes(traces.pull)
    forward_reads = read_arguments(traces.forward, len(params))
  work = StageWork(
    input_bytes=_num_bytes(shapes.x),
    kept_bytes=traces.kept_bytes,
    forward_flops=forward_flops,
    backward_flops=backward_flops,
    recompute_flops=both_flops - backward_flops,
    forward_bytes=forward_bytes,
    backward_bytes=backward_bytes,
    temp_bytes=peak_live_bytes(traces.both),
  )
  return work, (forward_reads, read_arguments(traces.both, len(params)))


@dataclasses.dataclass(frozen=True)
class _Traces:
  """Jaxprs of a stage.

  Attributes:
    forward: from parameters, other state and input to the output.
    both: from the same, and the output's gradient, to the gradients.
    pull: from what forward leaves to the gradients; None in the last stage,
      whose forward may compute gradients at once.
    kept_bytes: of what forward leaves if activations are kept.
  """

  forward: Any
  both: Any
  pull: Any
  kept_bytes: int


def _trace_other(
  spec: StageSpec, arguments: tuple[Any, ...], shapes: StageShapes
) -> _Traces:
  def both(params, other, x, dy):
    _, pull, _ = pull_back(spec, params, other, x)
    return pull(dy)

  _, pull, _ = jax.eval_shape(functools.partial(pull_back, spec), *arguments)
  _, _, kept = jax.eval_shape(
    functools.partial(run_forward_keeping, spec), *arguments
  )
  return _Traces(
    forward=_jaxpr(functools.partial(run_forward, spec), *arguments),
    both=_jaxpr(both, *arguments, shapes.y),
    pull=_jaxpr(lambda pull, dy: pull(dy), pull, shapes.y),
    kept_bytes=sum(map(_num_bytes, kept.arrays)),
  )


def _trace_last(
  spec: StageSpec, arguments: tuple[Any, ...], shapes: StageShapes
) -> _Traces:
  tokens = jax.ShapeDtypeStruct(shapes.targets, jnp.int32)
  mask = jax.ShapeDtypeStruct(shapes.targets, jnp.float32)

  def forward(params, other, x, tokens, mask):
    module = spec.parts.merge(params, other)
    module.train()
    return loss_function(module, spec.loss)(x, tokens, mask)

  def both(params, other, x, tokens, mask, scale):
    targets = Targets(tokens, mask, scale, scale)
    y, pull, new_other = pull_back(spec, params, other, x, targets)
    return y, pull(scale), new_other

  return _Traces(
    forward=_jaxpr(forward, *arguments, tokens, mask),
    both=_jaxpr(both, *arguments, tokens, mask, shapes.y),
    pull=None,
    kept_bytes=0,
  )


def _jaxpr(function: Any, *arguments: Any) -> Any:
  return jax.make_jaxpr(function)(*arguments).jaxpr


def _num_bytes(array: Any) -> int:
  return array.size * array.dtype.itemsize
