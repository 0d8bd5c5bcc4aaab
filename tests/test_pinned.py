"""The limit of pinned memory is asked for by name, before anything is there."""

import dataclasses

import jax
import pytest

import sojax
from sojax import trainer as trainer_lib
from sojax.cluster.mesh import pinned_limit_bytes
from sojax.plan.account import Account
from sojax.plan.pinned import (
  DEFAULT_PINNED_LIMIT_BYTES,
  PINNED_LIMIT,
  check_pinned_limit,
  needed_limit_gb,
)
from sojax.planner.explain import environment, explain
from sojax.planner.search import search
from tests.planning import problem, profile
from tests.training import config, optimizer, small_gpt

GIB = 1 << 30
VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def account(**host):
  names = ("working_copy", "ring", "gradients", "stage_inputs", "masters")
  return Account(host=dict.fromkeys(names, 0) | host, device={}, network={})


def test_what_is_pinned_is_what_crosses_the_link():
  of = account(working_copy=1, ring=2, gradients=4, stage_inputs=8, masters=16)
  assert of.pinned_bytes == 15


@pytest.mark.parametrize(
  ("gib", "limit_gib", "needed"),
  [(58, 64, None), (59, 64, 65), (100, 64, 110), (100, 110, None), (1, 1, 2)],
)
def test_the_limit_is_what_is_pinned_and_a_tenth(gib, limit_gib, needed):
  of = account(gradients=gib * GIB)
  assert needed_limit_gb(of, limit_gib * GIB) == needed
  if needed is None:
    check_pinned_limit(of, limit_gib * GIB)
    return
  with pytest.raises(ValueError, match=f"{VARIABLE}={needed} in the environ"):
    check_pinned_limit(of, limit_gib * GIB)


def test_without_a_limit_anything_goes():
  check_pinned_limit(account(ring=1000 * GIB), None)


def limit_of(platform):
  return pinned_limit_bytes(platform, PINNED_LIMIT, DEFAULT_PINNED_LIMIT_BYTES)


def test_the_environment_names_the_limit_of_gpus(monkeypatch):
  monkeypatch.delenv(VARIABLE, raising=False)
  assert limit_of("cpu") is None
  assert limit_of("gpu") == limit_of("cuda") == 64 * GIB
  monkeypatch.setenv(VARIABLE, "300")
  assert limit_of("gpu") == 300 * GIB
  assert limit_of("cpu") is None
  monkeypatch.setenv(VARIABLE, "3e2")
  with pytest.raises(
    ValueError, match=f"{VARIABLE}='3e2' is not a whole number"
  ):
    limit_of("gpu")


@pytest.mark.usefixtures("no_garbage")
def test_a_trainer_asks_before_it_allocates(monkeypatch):
  """As if the device were a GPU with 1 MiB of pinned memory."""

  def limit(platform, variable, default_bytes):
    assert (platform, variable, default_bytes) == ("cpu", VARIABLE, 64 * GIB)
    return 1 << 20

  def never(setup):
    raise AssertionError("something was allocated")

  monkeypatch.setattr(trainer_lib, "pinned_limit_bytes", limit)
  monkeypatch.setattr(trainer_lib, "Stepper", never)
  model = small_gpt()
  before = len(jax.live_arrays())
  with pytest.raises(ValueError, match=f"{VARIABLE}=1 in the environment"):
    sojax.Trainer(model, optimizer(), config())
  assert len(jax.live_arrays()) == before


def test_the_planner_asks_for_the_limit_by_name():
  of = problem(num_stages=45, num_columns=2**16, forced={"device_buckets": 0})
  large = search(of)  # 45 * 2**29 parameters, of which gradients are pinned
  pinned = large.best.account.pinned_bytes
  assert pinned > 64 * GIB
  needed = environment(large.best)[VARIABLE]
  assert 11 * pinned <= 10 * int(needed) * GIB < 11 * pinned + 10 * GIB
  assert f"set {VARIABLE}={needed} in the environment" in explain(large)
  small = search(problem())
  assert environment(small.best) == {}
  assert VARIABLE not in explain(small)


def test_a_device_that_is_the_host_has_no_limit():
  of = problem(num_stages=45, num_columns=2**16, forced={"device_buckets": 0})
  best = search(of).best
  shared = dataclasses.replace(
    of, profile=profile(device_is_host=True, host_bytes=10**12)
  )
  assert environment(dataclasses.replace(best, problem=shared)) == {}
