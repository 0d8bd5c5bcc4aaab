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


@dataclasses.dataclass(frozen=True)
class CollectiveBytes:
  """What the collectives of one micro-batch carry, by stage.

  Attributes:
    forward: bytes of weights that a stage's forward gathers; 0 of the last one.
    backward: bytes that its backward gathers.
    scatter: bytes of float32 gradients that its backward adds up.
  """

  forward: tuple[int, ...]
  backward: tuple[int, ...]
  scatter: tuple[int, ...]


def collective_bytes(
  layout: Layout, config: TrainConfig, needs: Sequence[Needs]
) -> CollectiveBytes:
  """Returns what the collectives of each stage carry.

  Args:
    layout: the model cut into units, each with a shard on every device.
    config: what is trained.
    needs: what each stage reads.
  """
  working = DTYPE_BYTES[config.working_dtype]
  stages = range(layout.model.num_stages)
  return CollectiveBytes(
    forward=(
      *(working * _elems(layout, s, needs[s].forward) for s in stages[:-1]),
      0,
    ),
    backward=tuple(
      working * _elems(layout, s, needs[s].backward) for s in stages
    ),
    scatter=tuple(
      4 * sum(b.size for b in layout.of_stage(s) if b.trained) for s in stages
    ),
  )


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
  carried = collective_bytes(layout, config, needs)
  times = config.accumulation
  return {
    "all_gather": times * (sum(carried.forward) + sum(carried.backward))
    + 4 * layout.num_shards,
    "reduce_scatter": times * sum(carried.scatter),
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
