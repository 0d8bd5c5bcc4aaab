"""Gradients that leave backward while it runs, against those sent after it."""

import functools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from sojax.graph.graph import TaskKind
from tests.layered import Staged, Whole
from tests.training import (
  assert_same_bits,
  batches,
  mesh_of,
  small_gpt,
  state_of,
  trainer,
)


def large_enough_to_cut():
  """Leaves of 1 MiB and more, which buckets of 1 MiB cut."""
  return small_gpt(vocab_size=2048, hidden_dim=256)


def large_enough_to_cut_whole():
  return Whole(dim=600, num_layers=2)


def ragged():
  """Without stages; its wire units do not divide into eight shards."""
  return Whole(dim=31)


MODELS = {
  "ragged": ragged,
  "gpt": small_gpt,
  "cut gpt": large_enough_to_cut,
  "whole": Whole,
  "cut whole": large_enough_to_cut_whole,
}


@functools.cache
def run(transport, model, plan, changes):
  """Returns the losses of ten steps, and the state after them."""
  changes = dict(changes)
  num_devices = changes.pop("num_devices", 1)
  if num_devices > 1:
    changes |= {"mesh": mesh_of(num_devices), "micro_batch": 1}
  rows = changes.get("micro_batch", 4) * num_devices
  rows *= changes.get("accumulation", 1)
  plan = dict(plan, gradients_out=transport)
  with trainer(plan, model=MODELS[model](), **changes) as ours:
    metrics = [ours.step(batch) for batch in batches(10, rows=rows)]
    outcome = {
      "loss": np.array([m.loss for m in metrics]),
      "grad_norm": np.array([m.grad_norm for m in metrics]),
      **state_of(ours),
    }
    spec = ours._parts.compute._programs[-1].spec
    assert (not spec.num_delivered) is (transport == "dma")
  return outcome


CASES = [
  ("gpt", {}, {}),
  ("gpt", {"weights": "flow"}, {"precision": "bf16"}),
  ("gpt", {"grad_cast": "device"}, {"precision": "bf16"}),
  ("gpt", {"activations": "keep"}, {"accumulation": 2}),
  ("gpt", {"bucket_bytes": 1 << 16, "device_buckets": 3}, {}),
  ("cut gpt", {"bucket_bytes": 1 << 20}, {}),
  ("whole", {}, {"precision": "fp16"}),
  ("whole", {}, {"accumulation": 2, "precision": "bf16"}),
  ("gpt", {"accumulate": "host"}, {"accumulation": 3}),
  ("whole", {"accumulate": "host"}, {"accumulation": 3, "precision": "bf16"}),
  ("whole", {"weights": "flow"}, {}),
  ("cut whole", {"bucket_bytes": 1 << 20, "device_buckets": 1}, {}),
]


@pytest.mark.parametrize(
  "transport",
  ["callback", pytest.param("io_callback", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("model", "plan", "changes"), CASES, ids=str)
def test_ten_steps_have_the_bits_of_dma(model, plan, changes, transport):
  case = model, tuple(plan.items()), tuple(changes.items())
  assert_same_bits(run(transport, *case), run("dma", *case))


@pytest.mark.parametrize(
  ("model", "plan", "changes"),
  [
    ("gpt", {"bucket_bytes": 1 << 16, "device_buckets": 2}, {}),
    ("gpt", {"weights": "flow"}, {"precision": "bf16"}),
    ("ragged", {}, {"precision": "bf16"}),
    ("ragged", {"accumulate": "host"}, {"accumulation": 3}),
    ("gpt", {"accumulate": "host"}, {"accumulation": 2}),
  ],
  ids=str,
)
def test_each_of_8_devices_delivers_its_shards(model, plan, changes):
  changes = changes | {"num_devices": 8}
  case = model, tuple(plan.items()), tuple(changes.items())
  assert_same_bits(run("callback", *case), run("dma", *case))


def test_io_callback_is_for_one_device():
  plan = {"gradients_out": "io_callback"}
  with pytest.raises(ValueError, match="io_callback on 2 devices can hang"):
    trainer(plan, mesh=mesh_of(2))


def test_only_a_model_of_one_stage_leaves_by_callback_unless_told():
  for model, transport in ((Whole(), "callback"), (Staged(), "dma")):
    with trainer(model=model) as ours:
      specs = [programs.spec for programs in ours._parts.compute._programs]
      assert {spec.transport for spec in specs} == {transport}
      for spec in specs:
        num_units = len(spec.units) if transport == "callback" else 0
        assert spec.num_delivered == num_units


def test_equal_stages_share_the_program_that_delivers():
  plan = {"gradients_out": "callback"}
  with trainer(plan, model=Staged(num_layers=5)) as ours:
    ours.step(batches(1)[0])
    ours.drain()
    first, *others = ours._parts.compute._programs[1:-1]
    assert all(programs is first for programs in others)
    assert first.finish._jitted._cache_size() == 1


def test_gradients_arrive_before_most_of_backward_has_run():
  """Backward of the first layer takes the gradients of the last ones itself,
  on the host: of the head and of two layers out of four."""
  late = tuple(f"model.layers.{i}." for i in (3, 4, 5))
  taken = []

  def take():
    give_up = threading.Timer(60, out._sink.interrupt)
    give_up.start()
    for bucket in wanted:
      out._sink.wait(out._routes[0, 0], out._places[bucket])
      taken.append(bucket)
    give_up.cancel()

  def grad_out(task, step):
    if task.bucket not in wanted:
      return out.grad_out(task, step)
    assert taken == wanted
    buffers = out._buffers[task.bucket, 0]
    step.host_grads[task.bucket] = [b.shards_inout for b in buffers]
    return None

  plan = {"bucket_bytes": 1 << 16}  # a bucket for each matrix
  model = Whole(dim=128, num_layers=4, on_backward=take)
  with trainer(plan, model=model) as ours:
    out = ours._parts.gradients_out
    leaves = ours.layout.model.leaves
    wanted = [
      bucket.index
      for bucket in ours.layout.buckets
      if all(leaves[s.leaf].name.startswith(late) for s in bucket.slices)
    ]
    assert wanted == [0, 1, 2, 3]  # two of the head, and two layers
    ours._executor._actions[TaskKind.GRAD_OUT] = grad_out
    ours.step(batches(1)[0])
    ours.drain()
    assert taken == wanted
    assert ours.count == 1


def test_gradients_arrive_in_the_order_of_buckets():
  """What waits for one bucket after the other then waits for none too long."""
  arrived = []
  plan = {"bucket_bytes": 1 << 16, "gradients_out": "io_callback"}
  with trainer(plan, model=Whole(dim=128)) as ours:
    sink = ours._parts.gradients_out._sink
    deliver = sink._deliver

    def noting(number, place, gradient):
      arrived.append(place)
      deliver(number, place, gradient)

    sink._deliver = noting
    ours.step(batches(1)[0])
    ours.drain()
    # Pieces of one leaf may come in any order.
    first_leaf = [next(b.slices).leaf for b in ours.layout.buckets]
    assert [first_leaf[place] for place in arrived] == first_leaf


@pytest.mark.parametrize("transport", ["dma", "callback"])
def test_the_account_says_where_gradients_are(transport):
  plan = {"bucket_bytes": 1 << 16, "device_buckets": 1}
  with trainer(plan | {"gradients_out": transport}) as ours:
    units = {}
    watch_units(ours, units)
    ours.step(batches(1)[0])
    ours.drain()
    buckets = ours.layout.buckets
    on_host = sum(4 * b.size for b in buckets if not b.on_device)
    assert sum(units.values()) == ours.account.device["gradients"]
    assert ours.account.host["gradients"] == on_host
    if transport == "callback":
      held = ours._parts.gradients_out._buffers
      arrays = [buffer.array for b in held.values() for buffer in b]
      assert sum(array.nbytes for array in arrays) == on_host
      assert {a.sharding.memory_kind for a in arrays} == {"pinned_host"}
      assert len(units) == 1


def watch_units(ours, units):
  """Notes the bytes of each bucket that backward returns."""
  actions = ours._executor._actions
  backward = actions[TaskKind.BACKWARD]

  def watching(task, step):
    wait = backward(task, step)
    for bucket, arrays in step.units.items():
      units[bucket] = sum(array.nbytes for array in arrays)
    return wait

  actions[TaskKind.BACKWARD] = watching


_ON_ONE_CORE = """
from tests import conftest
from tests.layered import Staged, Whole
from tests.training import batches, trainer

for model in (Whole(dim=400), Staged(dim=400)):
  plan = {"gradients_out": "callback", "bucket_bytes": 1 << 20}
  with trainer(plan, model=model) as ours:
    for batch in batches(4):
      ours.step(batch)
    ours.drain()
print("trained")
"""


@pytest.mark.parametrize("num_devices", [1, 8])
def test_training_does_not_hang_on_one_core(num_devices):
  """Without PJRT_NPROC, which gives JAX more threads than there are cores."""
  script = _ON_ONE_CORE
  if num_devices == 1:
    script = "import os\nos.environ['JAX_PLATFORMS'] = 'cpu'" + script.replace(
      "from tests import conftest\n", ""
    )
  environment = {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"}
  del environment["XLA_FLAGS"]
  result = subprocess.run(
    ["taskset", "-c", "0", sys.executable, "-c", script],
    capture_output=True,
    text=True,
    timeout=300,
    env=environment,
  )
  assert result.stdout == "trained\n", result.stderr
