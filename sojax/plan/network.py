"""The bytes that a step's collectives carry between devices."""

import dataclasses
from collections.abc import Iterable, Sequence

from sojax.plan.buckets import Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import DTYPE_BYTES


@dataclasses.dataclass(frozen=True)
class Needs:
  """Indices of the leaves that a stage's forward, and its backward, read."""

  forward: frozenset[int]
  backward: frozenset[int]


def network_bytes(
  layout: Layout, config: TrainConfig, needs: Sequence[Needs]
) -> dict[str, int]:
  """Adds up what the collectives of a step carry.

  Args:
    layout: the model cut into units, each with a shard on every device.
    config: what is trained.
    needs: what each stage reads.

  Returns:
    "all_gather": bytes of gathered weights, in the working dtype, for each
    forward and each backward of a stage that needs them, and the sums of
    squares of all ranks; "reduce_scatter": bytes of float32 gradients before
    they are added up; "all_reduce": the losses. All of one device: a ring sends
    (devices - 1) / devices of an all_gather or reduce_scatter over each link.
    All are 0 on one device. Averages of floating-point other state (running
    statistics) are not counted. Stages that keep their activations gather less
    in backward, if they do not need all weights.
  """
  if layout.num_shards == 1:
    return {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
  stages = range(layout.model.num_stages)
  gathered = sum(
    _elems(layout, stage, needs[stage].forward) for stage in stages[:-1]
  ) + sum(_elems(layout, stage, needs[stage].backward) for stage in stages)
  gradients = sum(bucket.size for bucket in layout.buckets if bucket.trained)
  times = config.accumulation
  working = DTYPE_BYTES[config.working_dtype]
  return {
    "all_gather": times * working * gathered + 4 * layout.num_shards,
    "reduce_scatter": times * 4 * gradients,
    "all_reduce": times * 4,
  }


def _elems(layout: Layout, stage: int, needed: Iterable[int]) -> int:
  """Returns the elements of the units that hold a needed leaf."""
  leaves = set(needed)
  return sum(
    bucket.units[number].size
    for bucket, number in layout.units_used_by(stage)
    if any(piece.leaf in leaves for piece in bucket.units[number].slices)
  )
