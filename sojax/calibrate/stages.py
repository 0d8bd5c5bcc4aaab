"""The seconds of a model's stages, by running them."""

import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from sojax.calibrate.timing import Effort, cold_copies, median_s
from sojax.cluster.mesh import Placement
from sojax.plan.costs import StageSeconds
from sojax.plan.plan import DTYPE_BYTES
from sojax.programs.keep import KeepPrograms, make_keep_programs
from sojax.programs.spec import Targets
from sojax.programs.stages import StagePrograms, make_stage_programs
from sojax.programs.trace import StageShapes, trace_stages
from sojax.runtime.setup import Setup


def measure_stages(
  setup: Setup,
  *,
  effort: Effort | None = None,
  vocab_size: int | None = None,
) -> StageSeconds:
  """Runs forward and backward of every stage, alone, on inputs made up.

  Backward is that of a step's last micro-batch, without sums of earlier ones,
  and returns its gradients: what a callback takes to deliver them is not in it.
  Stages of equal programs and arguments are measured once. The devices hold the
  parameters and inputs of one stage at a time, and what it returns; of a small
  one several, up to 256 MiB, since a stage finds nothing in a cache when its
  turn comes.

  Args:
    setup: the model, and the way it is trained.
    effort: how long to measure; None for a quarter of a second each.
    vocab_size: tokens are drawn below it. None takes token 0 everywhere, which
      all models have.

  Returns:
    Medians; the last stage, which has no forward, has one of 0.
  """
  budget_s = (effort or Effort()).seconds
  plan = dataclasses.replace(setup.plan, gradients_out="dma")
  config, placement = setup.config, setup.placement
  batch_shape = config.micro_batch, config.seq_len
  shapes = trace_stages(setup.split, config.working_dtype, batch_shape)
  programs = make_stage_programs(
    setup.split, setup.layout, shapes, plan, config, placement
  )
  keep = make_keep_programs(programs, plan, placement)
  known: dict[Any, tuple[float, float]] = {}
  measured = []
  for stage, shape in enumerate(shapes):
    inputs = _Inputs(setup, stage, shape, vocab_size or 1)
    key = programs[stage].spec, stage in keep, inputs.key
    if key not in known:
      of_stage = keep.get(stage, programs[stage])
      known[key] = _measure(of_stage, inputs, budget_s)
    measured.append(known[key])
  forward, backward = zip(*measured, strict=True)
  return StageSeconds(forward=forward, backward=backward)


class _Abstract(NamedTuple):
  """An array that is made when it is needed; hashable."""

  shape: tuple[int, ...]
  dtype: str
  sharding: NamedSharding


class _Inputs:
  """What the programs of one stage take.

  Attributes:
    key: equal for stages whose arguments have equal shapes.
  """

  def __init__(
    self, setup: Setup, stage: int, shapes: StageShapes, vocab_size: int
  ):
    self._setup, self._stage = setup, stage
    self._vocab_size = vocab_size
    self._is_last = stage == setup.layout.model.num_stages - 1
    self._params = _params(setup, stage)
    self._x = self._rows(shapes.x)
    self._y = None if self._is_last else self._rows(shapes.y)
    self._tied = _tied(setup, stage)
    other = tuple((x.shape, str(x.dtype)) for x in setup.split.other[stage])
    tied = tuple(sorted(self._tied.items()))
    self.key = self._params, self._x, self._y, tied, other

  def params(self) -> tuple[jax.Array, ...]:
    """Makes the parameters, or the shards that they are gathered from."""
    return tuple(_normal(x, 0.02) for x in self._params)

  @property
  def param_bytes(self) -> int:
    """How many bytes the parameters are."""
    return sum(math.prod(x.shape) * DTYPE_BYTES[x.dtype] for x in self._params)

  def other(self) -> tuple[jax.Array, ...]:
    """Returns the other state, on the devices."""
    device = self._setup.placement.device
    other = self._setup.split.other[self._stage]
    return tuple(jax.device_put(leaf, device) for leaf in other)

  def x(self) -> jax.Array:
    """Makes the input."""
    if jnp.issubdtype(self._x.dtype, jnp.integer):
      return self._tokens(self._x.shape)
    return _normal(self._x)

  def dy(self) -> jax.Array | Targets:
    """Makes what backward begins with; it may be donated."""
    if self._y is not None:
      return _normal(self._y, 1e-3)
    placement, shape = self._setup.placement, self._x.shape[:2]
    ones = jnp.ones(shape, jnp.float32)
    scale = jax.device_put(jnp.float32(1 / ones.size), placement.device)
    return Targets(
      tokens=self._tokens(shape),
      mask=jax.device_put(ones, placement.rows),
      scale=scale,
      loss_scale=jax.device_put(jnp.float32(1.0), placement.device),
    )

  def tied(self) -> dict[int, list[jax.Array]]:
    """Makes the gradients from borrowers, by place."""
    return {
      place: [_normal(x, 1e-3) for x in arrays]
      for place, arrays in self._tied.items()
    }

  def _rows(self, x: jax.ShapeDtypeStruct) -> _Abstract:
    placement = self._setup.placement
    shape = x.shape[0] * placement.num_data_ranks, *x.shape[1:]
    return _Abstract(shape, str(x.dtype), _as_returned(placement))

  def _tokens(self, shape: tuple[int, ...]) -> jax.Array:
    drawn = jax.random.randint(jax.random.key(0), shape, 0, self._vocab_size)
    return jax.device_put(drawn, self._setup.placement.rows)


def _params(setup: Setup, stage: int) -> tuple[_Abstract, ...]:
  placement, dtype = setup.placement, setup.config.working_dtype
  if placement.num_devices == 1:
    leaves = [setup.split.shape.leaves[x] for x in setup.split.used[stage]]
    return tuple(_Abstract(x.shape, dtype, placement.device) for x in leaves)
  units = [
    bucket.units[number] for bucket, number in setup.layout.units_used_by(stage)
  ]
  return tuple(_Abstract(x.shape, dtype, placement.units) for x in units)


def _as_returned(placement: Placement) -> NamedSharding:
  """Returns where programs leave what is divided among the ranks."""
  return placement.device if placement.num_devices == 1 else placement.rows


def _tied(setup: Setup, stage: int) -> dict[int, tuple[_Abstract, ...]]:
  """Returns the gradients from borrowers, by place; several ranks' stacked."""
  model, placement = setup.layout.model, setup.placement
  stacked = () if placement.num_devices == 1 else (placement.num_devices,)
  found = {}
  for place, leaf in enumerate(setup.split.used[stage]):
    if leaf in model.borrowed[stage] or not model.leaves[leaf].trained:
      continue
    number = sum(leaf in borrowed for borrowed in model.borrowed)
    if number:
      shape = *stacked, *model.leaves[leaf].shape
      grad = _Abstract(
        shape, setup.config.working_dtype, _as_returned(placement)
      )
      found[place] = (grad,) * number
  return found


def _measure(
  programs: StagePrograms | KeepPrograms, inputs: _Inputs, budget_s: float
) -> tuple[float, float]:
  """Returns the seconds of a stage's forward and backward."""
  other, x, tied = inputs.other(), inputs.x(), inputs.tied()
  params = itertools.cycle(
    [inputs.params() for _ in range(cold_copies(inputs.param_bytes))]
  )
  forward_s, left = 0.0, (other, x)

  def timed(
    run: Callable[[Any, Any], Any], prepare: Callable[[], Any]
  ) -> float:
    """Returns the median of what takes parameters and what was prepared.

    So many results are kept that the next one, too, goes to memory in no cache.
    """
    first = jax.block_until_ready(run(next(params), prepare()))
    result_bytes = sum(x.nbytes for x in jax.tree.leaves(first))
    results = deque([first], maxlen=cold_copies(result_bytes))

    def run_and_keep(prepared: Any) -> None:
      results.append(jax.block_until_ready(run(next(params), prepared)))

    return median_s(run_and_keep, budget_s, prepare)

  if not programs.spec.position.is_last:
    forward_s = timed(lambda p, _: programs.forward(p, other, x), lambda: None)
    if isinstance(programs, KeepPrograms):
      y, _, kept = programs.forward(next(params), other, x)
      left = kept.with_held(other, x, y)
  backward_s = timed(
    lambda p, dy: programs.finish(p, *left, dy, tied, (), None),
    lambda: jax.block_until_ready(inputs.dy()),
  )
  return forward_s, backward_s


def _normal(array: _Abstract, scale: float = 1.0) -> jax.Array:
  """Makes random numbers: zeros could be faster, or not finite at the end."""
  return _draw(array.shape, array.dtype, array.sharding)(jnp.float32(scale))


@functools.lru_cache
def _draw(
  shape: tuple[int, ...], dtype: str, sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
  def draw(scale: jax.Array) -> jax.Array:
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32)
    return (scale * x).astype(dtype)

  return jax.jit(draw, out_shardings=sharding)
