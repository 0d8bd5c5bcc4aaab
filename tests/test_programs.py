"""Small device programs: casts, Validate, the device update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sojax.cluster.mesh import Placement
from sojax.host.adam import write_weights
from sojax.plan.adamw import adam_scalars, adamw
from sojax.plan.config import LossScale
from sojax.programs.casts import narrow
from sojax.programs.device_update import (
  DeviceState,
  make_device_update,
  scalar_array,
)
from sojax.programs.validate import (
  ScaleState,
  make_keep_if_skipped,
  make_validate,
)
from sojax.reference.adamw import adamw_float32, adamw_float64

PLACEMENT = Placement.of(None)


def put(x):
  return jax.device_put(np.array(x), PLACEMENT.device)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_device_rounds_weights_as_the_host_does(dtype):
  """All upper halves, with lower halves around bfloat16's tie, and more."""
  high = np.arange(1 << 16, dtype=np.uint32) << 16
  low = np.array(
    [0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32
  )
  master = (high[:, None] | low).reshape(-1).view(np.float32)
  on_host = np.empty(master.shape, jnp.dtype(dtype))
  write_weights(master, on_host)
  on_device = np.asarray(jax.jit(lambda x: narrow(x, dtype))(put(master)))
  assert on_device.tobytes() == on_host.tobytes()


def run_validate(sumsqs, *, clip_norm=1.0, rule=None, scale=1.0, good_steps=0):
  """Returns Validate's verdict and the next scale, as NumPy scalars."""
  state = ScaleState(put(np.float32(scale)), put(np.int32(good_steps)))
  arrays = [put(np.array(x, np.float32)) for x in sumsqs]
  results = make_validate(clip_norm, rule, PLACEMENT)(arrays, None, state)
  return jax.tree.map(np.asarray, results)


@pytest.mark.parametrize("clip_norm", [None, 1.0, 0.3])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_validate_gives_norm_scale_and_finite(clip_norm, loss_scale):
  sums = np.array([0.25, 0.5, 1.5]) * loss_scale**2
  verdict, _ = run_validate(
    [sums[:2], sums[2:]], clip_norm=clip_norm, scale=loss_scale
  )
  norm = np.sqrt(np.float32(2.25))
  assert verdict.norm == norm
  assert verdict.finite
  clip = 1.0 if clip_norm is None else np.float32(clip_norm) / norm
  assert verdict.grad_scale == np.float32(min(1.0, clip)) / loss_scale


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_validate_sees_one_value_that_is_not_finite(bad):
  verdict, _ = run_validate([[1.0, bad], [1.0, 1.0, 1.0]])
  assert not verdict.finite


def test_validate_leaves_a_zero_gradient_alone():
  verdict, _ = run_validate([[0.0, 0.0]])
  assert verdict.finite
  assert verdict.grad_scale == 1.0


@pytest.mark.parametrize(
  ("bad", "before", "after"),
  [
    (False, (64.0, 0), (64.0, 1)),
    (False, (64.0, 2), (256.0, 0)),
    (False, (2.0**24, 2), (2.0**24, 0)),
    (True, (64.0, 2), (32.0, 0)),
    (True, (1.0, 0), (1.0, 0)),
  ],
)
def test_the_loss_scale_follows_its_rule(bad, before, after):
  rule = LossScale(growth_interval=3, growth_factor=4.0)
  sums = [[np.inf if bad else 1.0]]
  _, state = run_validate(
    sums, rule=rule, scale=before[0], good_steps=before[1]
  )
  assert (state.scale, state.good_steps) == after
  _, kept = run_validate(sums, scale=before[0], good_steps=before[1])
  assert (kept.scale, kept.good_steps) == before


@pytest.mark.parametrize("finite", [True, False])
def test_other_state_is_kept_if_the_step_is_skipped(finite):
  old = (put(np.uint32(3)), jax.device_put(jax.random.key(1), PLACEMENT.device))
  new = (put(np.uint32(4)), jax.device_put(jax.random.key(2), PLACEMENT.device))
  kept = make_keep_if_skipped(PLACEMENT)(put(finite), old, new)
  wanted = new if finite else old
  assert int(kept[0]) == int(wanted[0])
  np.testing.assert_array_equal(
    jax.random.key_data(kept[1]), jax.random.key_data(wanted[1])
  )


def state_and_grads(shapes, grad_dtype):
  rng = np.random.default_rng(0)

  def normal(scale):
    return [(scale * rng.standard_normal(s)).astype(np.float32) for s in shapes]

  grads = [g.astype(jnp.dtype(grad_dtype)) for g in normal(1e-2)]
  return normal(0.05), normal(1e-3), [x**2 for x in normal(1e-3)], grads


@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("working_dtype", ["float32", "bfloat16"])
def test_device_update_is_adamw(grad_dtype, working_dtype):
  """Oracle: the float32 twin and float64.

  XLA may or may not fuse each multiplication with an addition: every element
  is within a few roundings of the twin, and within the kernel's own error of
  the meaning in float64.
  """
  shapes = [(33,), (4, 5)]
  hyper = adamw(1e-3, b2=0.95, eps_root=1e-9, weight_decay=0.1)
  p, mu, nu, grads = state_and_grads(shapes, grad_dtype)
  state = DeviceState(*(tuple(map(put, x)) for x in (p, mu, nu)))
  new, weights, ended = make_device_update(working_dtype, PLACEMENT)(
    state,
    tuple(put(g) for g in grads),
    put(scalar_array(adam_scalars(hyper, 6))),
    put(np.float32(0.7)),
    put(True),
  )
  assert bool(ended)
  for i, shape in enumerate(shapes):
    args = p[i], mu[i], nu[i], grads[i]
    twin = adamw_float32(
      *(x.reshape(-1) for x in args),
      scalars=adam_scalars(hyper, 6),
      grad_scale=np.float32(0.7),
    )
    exact = adamw_float64(
      *args,
      count=6,
      learning_rate=1e-3,
      b1=0.9,
      b2=0.95,
      eps=1e-8,
      eps_root=1e-9,
      weight_decay=0.1,
      grad_scale=np.float32(0.7),
    )
    ours = new.master[i], new.mu[i], new.nu[i]
    for mine, theirs, meant in zip(ours, twin, exact, strict=False):
      assert mine.shape == shape
      bound = 4 * 2.0**-24 * np.abs(meant).max()
      assert np.all(np.abs(mine - theirs.reshape(shape)) <= bound)
      assert np.all(np.abs(mine - meant) <= bound)
    if working_dtype == "bfloat16":
      rounded = np.empty(ours[0].size, jnp.bfloat16)
      write_weights(np.asarray(ours[0]).reshape(-1), rounded)
      assert np.asarray(weights[i]).tobytes() == rounded.tobytes()
    else:
      assert weights == ()


def test_device_update_of_a_skipped_step_keeps_every_bit():
  p, mu, nu, grads = state_and_grads([(33,)], "float32")
  grads[0][3] = np.nan
  state = DeviceState(*(tuple(map(put, x)) for x in (p, mu, nu)))
  scalars = adam_scalars(adamw(1e-3), 0)
  new, _, ended = make_device_update("float32", PLACEMENT)(
    state,
    (put(grads[0]),),
    put(scalar_array(scalars)),
    put(np.float32(np.nan)),
    put(False),
  )
  assert not bool(ended)
  for ours, theirs in zip(
    (new.master, new.mu, new.nu), (p, mu, nu), strict=True
  ):
    assert np.asarray(ours[0]).tobytes() == theirs[0].tobytes()
