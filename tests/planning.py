"""Models and machines to plan, small and round."""

import dataclasses

from sojax.plan.adamw import adamw
from sojax.plan.buckets import Leaf, ModelShape
from sojax.plan.config import TrainConfig
from sojax.plan.hardware import Curve
from sojax.plan.machines import machine
from sojax.plan.workload import StageWork, Workload
from sojax.planner.problem import Problem

ROWS = 8192
"""Of each stage's one parameter, which has as many columns."""


def workload(num_stages=6, tokens=2048, num_columns=ROWS):
  """Equal stages of one parameter each."""
  elems = ROWS * num_columns
  flops = 2.0 * elems * tokens
  num_bytes = 2.0 * (elems + 2 * tokens * ROWS)
  work = StageWork(
    input_bytes=2 * tokens * ROWS,
    kept_bytes=12 * tokens * ROWS,
    forward_flops=flops,
    backward_flops=2 * flops,
    forward_bytes=num_bytes,
    backward_bytes=2 * num_bytes,
    temp_bytes=16 * tokens * ROWS,
  )
  leaves = tuple(
    Leaf(name=f"s{i}.w", stage=i, shape=(ROWS, num_columns), group=0)
    for i in range(num_stages)
  )
  return Workload(
    model=ModelShape(
      stage_names=tuple(f"s{i}" for i in range(num_stages)),
      leaves=leaves,
      borrowed=((),) * num_stages,
      groups=(adamw(1e-3),),
    ),
    backward_order=tuple(range(num_stages)),
    stages=(work,) * num_stages,
  )


def profile(**changes):
  """A machine of which some figures are others."""
  return dataclasses.replace(machine("gh200"), **changes)


def slow_link(bytes_per_s):
  """Figures of a machine with a slow link."""
  curve = Curve.flat(bytes_per_s)
  return {"d2h": curve, "h2d": curve}


def problem(*, forced=(), accumulation=1, precision="bf16", machine=None, **of):
  """A model to plan for a machine, by default a gh200.

  Args:
    forced: switches that are given.
    accumulation: micro-batches.
    precision: of the working weights.
    machine: a profile.
    of: arguments of `workload`.
  """
  made = workload(**of)
  config = TrainConfig(
    micro_batch=1,
    seq_len=of.get("tokens", 2048),
    accumulation=accumulation,
    precision=precision,
  )
  return Problem(
    workload=made,
    config=config,
    profile=machine or profile(),
    forced=dict(forced),
  )
