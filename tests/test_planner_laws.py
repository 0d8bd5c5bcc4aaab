"""Laws of planning: larger models take more memory; what is given is obeyed."""

import dataclasses
import functools
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

import sojax
from sojax.models import GPTConfig, presets
from sojax.plan.machines import machine
from sojax.plan.plan import MIB, Plan
from sojax.planner.evaluate import Evaluator
from sojax.planner.problem import Problem
from sojax.planner.search import DoesNotFit, search
from sojax.programs.workload import gpt_workload
from tests.planning import problem, profile

MIXED = ("stationary", "stationary", "flow")
# Of a model of three stages, whose machine has four cores.
GIVEN = {
  "weights": ("stationary", "flow", "flow_once", MIXED),
  "bucket_bytes": (32 * MIB, 100 * MIB),
  "device_buckets": (0, 1, 3),
  "host_ratio": (None, 0, 0.5, 1),
  "grad_cast": ("host", "device", "host_separate"),
  "weight_cast": ("host", "device", "host_separate"),
  "flow_window": (2, 5),
  "grad_window": (None, 1, 3),
  "ring_slots": (1, 2, 3),
  "pool_threads": (None, 1, 3),
  "pool_cores": (None, (0, 2, 3)),
  "numa_node": (None, 0),
  "gradients_out": (None, "dma", "callback"),
  "activations": ("keep", "recompute", "offload", ("keep", "offload", "keep")),
  "accumulate": ("host", "device"),
  "speculation": ("wait", "record2", "record3", "pingpong"),
  "speculate": ("adaptive", "always", "never"),
  "max_record_bytes": (None, 0, 200 * MIB),
  "escape_bytes_per_param": (0.0, 0.5, 2),
  "master": ("fp32", "split"),
  "park": ("host", "device"),
}


def test_every_switch_can_be_given():
  known = {field.name for field in dataclasses.fields(Plan)}
  assert known == {*GIVEN}


def check_obeyed(given):
  machine = profile(host_cores=4, device_is_host=True)
  of = problem(forced=given, num_stages=3, accumulation=2, machine=machine)
  try:
    Evaluator(of)(of.plan({}))
  except ValueError:
    with pytest.raises(ValueError):
      search(of)
    return
  try:
    ranking = search(of)
  except DoesNotFit as error:
    found = [error.nearest]
  else:
    found = [ranking.best, *ranking.others]
  for candidate in found:
    for name, value in given.items():
      assert getattr(candidate.plan, name) == value


@pytest.mark.parametrize("name", GIVEN)
def test_a_switch_that_is_given_is_obeyed(name):
  """None as well: it is a choice, and not the lack of one."""
  for value in GIVEN[name]:
    check_obeyed({name: value})


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=15, deadline=None)
def test_switches_that_are_given_together_are_obeyed_or_refused(data):
  names = data.draw(st.sets(st.sampled_from([*GIVEN]), min_size=2, max_size=5))
  check_obeyed({x: data.draw(st.sampled_from(GIVEN[x])) for x in sorted(names)})


SIZES = {
  "num_layers": (2, 3),
  "hidden_dim": (64, 96),
  "vocab_size": (256, 300),
}


@functools.cache
def gpt_problem(num_ranks, accumulation, **shape):
  config = sojax.TrainConfig(
    micro_batch=2, seq_len=32, precision="bf16", accumulation=accumulation
  )
  model = GPTConfig(num_heads=4, max_seq_len=32, **shape)
  workload = gpt_workload(model, config, sojax.adamw(1e-3), num_ranks)
  return Problem(workload=workload, config=config, profile=profile())


# Stages, and buckets of device buckets, are cut otherwise in another model.
SHAPELESS = {
  name: values
  for name, values in GIVEN.items()
  if not name.endswith(("_buckets", "_ratio", "bucket_bytes", "record_bytes"))
}


@pytest.mark.slow
@hypothesis.given(st.data())
@hypothesis.settings(max_examples=100, deadline=None)
def test_the_account_grows_with_layers_width_and_vocabulary(data):
  names = data.draw(st.sets(st.sampled_from([*SHAPELESS]), max_size=6))
  switches = {
    name: data.draw(
      st.sampled_from([v for v in SHAPELESS[name] if not isinstance(v, tuple)])
    )
    for name in sorted(names)
  }
  try:
    plan = Plan(bucket_bytes=1 << 30, **switches)
  except ValueError:
    hypothesis.reject()
  ranks, accumulation = data.draw(st.sampled_from([(1, 1), (1, 2), (4, 1)]))
  shape = {x: data.draw(st.sampled_from(SIZES[x][:-1])) for x in SIZES}
  grown = data.draw(st.sampled_from([*SIZES]))
  larger = shape | {grown: SIZES[grown][SIZES[grown].index(shape[grown]) + 1]}
  less, more = (
    Evaluator(gpt_problem(ranks, accumulation, **x))(plan).memory()
    for x in (shape, larger)
  )
  for space, purpose in itertools.chain(
    *([(space, name) for name in part] for space, part in less.items())
  ):
    assert more[space][purpose] >= less[space][purpose], (space, purpose)
  assert sum(more["host"].values()) > sum(less["host"].values())


def test_what_is_given_is_enough_if_it_fits():
  """All that a search begins with takes more of the host: records, inputs."""
  config = sojax.TrainConfig(micro_batch=16, seq_len=1024, precision="bf16")
  of = Problem(
    workload=gpt_workload(presets.gpt("1b"), config, sojax.adamw(1e-4)),
    config=config,
    profile=machine("gh200"),
    forced={"host_ratio": 1, "park": "host"},
  )
  memory = Evaluator(of)(of.plan({})).memory()
  tight = {
    f"{space}_bytes": int(1.005 * sum(part.values()) / 0.95)
    for space, part in memory.items()
  }
  profile = dataclasses.replace(of.profile, **tight)
  assert search(dataclasses.replace(of, profile=profile)).best.fits
