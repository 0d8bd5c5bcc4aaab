"""What a rank of several computes with: gathered weights, keys of its own.

Every device owns a shard of each wire unit (Rajbhandari et al., ZeRO,
arXiv 1910.02054, stage 3). A program puts the parameters of its stage together
when it starts, and they are gone when it ends.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sojax.programs.casts import narrow
from sojax.programs.flatten import from_units
from sojax.programs.manual import Ranks
from sojax.programs.spec import StageSpec

State = Sequence[jax.Array]


def parameters(spec: StageSpec, params: State) -> State:
  """Returns a stage's parameters, by place.

  Args:
    spec: the stage.
    params: the parameters themselves on one device; on several the shards of
      the units of `spec.gathered`, which may be float32 masters.
  """
  if spec.gathered is None:
    return params
  dtype = spec.working_dtype
  units = [
    spec.ranks.gather(shard if shard.dtype == dtype else narrow(shard, dtype))
    for shard in params
  ]
  shapes = spec.gathered.shapes
  leaves = from_units({}, units, spec.gathered.units, shapes)
  return [leaves[place] for place in range(len(shapes))]


def state_of_rank(ranks: Ranks, other: State) -> list[jax.Array]:
  """Returns other state with random keys that differ between ranks."""
  if ranks.alone:
    return list(other)
  return [
    jax.random.fold_in(leaf, ranks.index()) if _is_key(leaf) else leaf
    for leaf in other
  ]


def state_of_all(
  ranks: Ranks, other: State, of_rank: State, new: State
) -> tuple[jax.Array, ...]:
  """Returns the one new state of all ranks.

  Floating-point values, such as running statistics, are averaged over the
  ranks; integers, such as the counts of random streams, are the same on all.

  Args:
    ranks: the ranks.
    other: other state before the stage ran.
    of_rank: what `state_of_rank` made of it.
    new: what the stage made of that.

  Raises:
    ValueError: if the stage replaced a random key, which ranks do not share.
  """
  if ranks.alone:
    return tuple(new)
  together = []
  for before, mine, after in zip(other, of_rank, new, strict=True):
    if after is mine:
      together.append(before)
    elif _is_key(after):
      raise ValueError(
        "a stage replaces a random key while it runs; on several devices use a"
        " stream that counts, such as nnx.Rngs"
      )
    elif jnp.issubdtype(after.dtype, jnp.inexact):
      together.append(ranks.mean(after))
    else:
      together.append(after)
  return tuple(together)


def _is_key(leaf: jax.Array) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
