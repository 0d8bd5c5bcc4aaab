"""Where arrays live, and how much of the device they take."""

import jax
import numpy as np
import pytest

from sojax.cluster.mesh import Placement
from sojax.graph.graph import TaskKind
from sojax.programs.device_update import make_device_update
from tests.training import (
  batches,
  live_arrays_besides,
  small_gpt,
  trainer,
)

pytestmark = pytest.mark.usefixtures("no_garbage")

BLOCK_BYTES = 4 * (12 * 64**2 + 13 * 64)
INPUT_BYTES = 4 * 4 * 24 * 64


def on_device_bytes():
  return sum(
    array.nbytes
    for array in jax.live_arrays()
    if array.sharding.memory_kind == "device"
  )


def peak_bytes(plan, num_layers):
  """Returns the most bytes alive on the device in a step, over the least.

  Sampled around every task that is issued. The inputs of the stages, which
  grow with depth, are left out: they do not depend on where weights live.
  """
  ours = trainer(plan, model=small_gpt(num_layers=num_layers))
  data = batches(2)
  ours.step(data[0])
  ours.drain()
  samples = []
  for kind, action in list(ours._executor._actions.items()):

    def sampling(task, step, action=action):
      samples.append(on_device_bytes() - INPUT_BYTES * len(step.inputs))
      wait = action(task, step)
      samples.append(on_device_bytes() - INPUT_BYTES * len(step.inputs))
      return wait

    ours._executor._actions[kind] = sampling
  before = on_device_bytes()
  ours.step(data[1])
  ours.drain()
  stationary = BLOCK_BYTES * num_layers if plan == {} else 0
  ours.close()
  return max(samples) - before + stationary


def test_device_memory_in_weight_flow_does_not_grow_with_depth():
  """4, 8 and 16 blocks. At any time there are the weights of two uses, those
  whose transfer's end was not noticed yet, and gradients of two stages."""
  flow = {n: peak_bytes({"weights": "flow"}, n) for n in (4, 8, 16)}
  stationary = {n: peak_bytes({}, n) for n in (4, 8, 16)}
  assert all(peak < 5 * BLOCK_BYTES for peak in flow.values())
  assert stationary[16] - stationary[4] > 10 * BLOCK_BYTES


def compiled_bytes(ours, stage):
  """Returns argument, output and temporary bytes of a stage's backward."""
  programs = ours._parts.compute._programs[stage]
  leaves = ours.layout.model.leaves
  params = [
    jax.ShapeDtypeStruct(leaves[i].shape, np.float32)
    for i in ours._setup.split.used[stage]
  ]
  x = jax.ShapeDtypeStruct((4, 24, 64), np.float32)
  compiled = programs.finish.lower(params, (), x, x, {}, (), None).compile()
  memory = compiled.memory_analysis()
  return (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )


def test_compiled_programs_do_not_grow_with_depth():
  sizes = {}
  for num_layers in (4, 8, 16):
    model = small_gpt(num_layers=num_layers)
    with trainer({"weights": "flow"}, model=model) as ours:
      sizes[num_layers] = {
        compiled_bytes(ours, stage) for stage in range(1, num_layers + 1)
      }
      assert ours.account.device["weights"] <= 4 * BLOCK_BYTES
  assert sizes[4] == sizes[8] == sizes[16]
  (size,) = sizes[16]
  assert size >= 2 * BLOCK_BYTES  # parameters and gradients are in it


@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_transfers_end_in_the_memory_they_are_meant_for(weights, monkeypatch):
  """Offloading that silently does nothing would leave gradients behind."""
  moves = []
  put = jax.device_put

  def spying(arrays, sharding):
    moved = put(arrays, sharding)
    if isinstance(arrays, list):
      sources, targets = jax.tree.leaves(arrays), jax.tree.leaves(moved)
      moves.extend(
        (x.sharding.memory_kind, y.sharding.memory_kind)
        for x, y in zip(sources, targets, strict=True)
      )
    return moved

  views = []
  with trainer({"weights": weights, "bucket_bytes": 1 << 16}) as ours:
    host_update = ours._executor._actions[TaskKind.HOST_UPDATE]

    def looking(task, step):
      views.extend(shard for (shard,) in step.host_grads[task.bucket])
      return host_update(task, step)

    ours._executor._actions[TaskKind.HOST_UPDATE] = looking
    monkeypatch.setattr(jax, "device_put", spying)
    for batch in batches(2):
      ours.step(batch)
    ours.drain()
  out, back = ("device", "pinned_host"), ("pinned_host", "device")
  assert set(moves) == {out, back}
  assert moves.count(out) == len(views) > 0
  # The kernel reads JAX's pinned memory itself, not a copy of it.
  assert not any(view.flags.owndata or view.flags.writeable for view in views)


@pytest.mark.parametrize(
  "plan",
  [
    {},
    {"bucket_bytes": 1 << 16},
    {"bucket_bytes": 1 << 16, "device_buckets": 2},
    {"weight_cast": "device"},
    {"weights": "flow"},
    {"weights": "flow_once"},
  ],
  ids=str,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_after_a_step_the_device_holds_what_the_account_says(plan, precision):
  """New weights take the place of the old ones as they arrive."""
  model = small_gpt(vocab_size=2048)
  of_model = on_device_bytes()
  with trainer(plan, model=model, precision=precision) as ours:
    for batch in batches(2):
      ours.step(batch)
    ours.drain()
    weights, state = (
      ours.account.device[name] for name in ("weights", "device_buckets")
    )
    if "weights" in plan:  # all of them flow
      weights = 0
    slack = 1 << 12
    assert on_device_bytes() - of_model <= weights + state + slack
    assert ours.account.device_bytes > weights + state


def weights_on_device(step, x_shape, others):
  """Returns the bytes of 16-bit arrays that are neither x nor its gradient."""
  arrays = [
    array
    for array in live_arrays_besides(others)
    if array.sharding.memory_kind == "device" and array.dtype == "bfloat16"
  ]
  tied = [grad for grads in step.tied.values() for grad in grads]
  return sum(array.nbytes for array in arrays if array.shape != x_shape) - sum(
    grad.nbytes for grad in tied
  )


@pytest.mark.parametrize("cast", ["host", "device"])
@pytest.mark.parametrize(
  "mix",
  [
    ("stationary", "flow_once", "flow", "stationary", "flow_once", "flow"),
    ("flow", *["flow_once"] * 4, "stationary"),
  ],
  ids=str,
)
def test_the_device_has_the_weights_of_a_mix_that_the_account_says(mix, cast):
  """Sampled around every task. Gradients are float32 on the wire, weights are
  all 16-bit arrays but for activations and a tied gradient. What is on the wire
  as float32 is not counted."""
  x_shape = (4, 24, 64)
  plan = {"weights": mix, "grad_cast": "device", "weight_cast": cast}
  model = small_gpt(num_layers=4)
  others = jax.live_arrays()  # of tests before this one
  with trainer(plan, model=model, precision="bf16", accumulation=2) as ours:
    data = batches(2, rows=8)
    ours.step(data[0])
    ours.drain()
    of_stage = [
      sum(2 * bucket.size for bucket in ours.layout.of_stage(stage))
      for stage in range(6)
    ]

    def of_those(wanted):
      return sum(
        nbytes
        for nbytes, where in zip(of_stage, mix, strict=True)
        if where == wanted
      )

    samples, left = {}, {}
    for kind, action in list(ours._executor._actions.items()):

      def sampling(task, step, action=action):
        wait = action(task, step)
        sampled = weights_on_device(step, x_shape, others)
        samples.setdefault(task.name, []).append(sampled)
        if task.kind is TaskKind.VALIDATE:
          left.update(step.params | step.fetched)
        return wait

      ours._executor._actions[kind] = sampling
    ours.step(data[1])
    ours.drain()
    newest = ours._executor._recent[-1].step
    after = weights_on_device(newest, x_shape, others)
    account = ours.account.device["weights"]
  staying, kept = of_those("stationary"), of_those("flow_once")
  if mix[-1] == "flow_once":
    kept -= of_stage[-1]  # its only use is its backward
  most = max(max(x) for x in samples.values())
  assert staying + kept <= most <= account
  (turn,) = samples["backward stage=5 micro=0"]
  assert turn >= staying + kept
  assert not left  # of those, when the backwards have taken theirs
  assert after <= staying


def test_the_device_keeps_nothing_of_past_steps():
  with trainer() as ours:
    data = batches(6)
    for batch in data[:2]:
      ours.step(batch)
    ours.drain()
    before = on_device_bytes()
    for batch in data[2:]:
      ours.step(batch)
    ours.drain()
    # What is left of a step is scalars: losses and the verdict.
    assert on_device_bytes() - before <= 4 * 4 * 10


def test_a_device_update_reuses_the_buffers_of_its_state():
  with trainer({"device_buckets": 1}) as ours:
    ((index, state),) = ours._state.device.items()
    grads = [
      jax.ShapeDtypeStruct(unit.shape, np.float32)
      for unit in ours.layout.buckets[index].units
    ]
    update = make_device_update("float32", Placement.of(None))
    scalar = jax.ShapeDtypeStruct((), np.float32)
    nine = jax.ShapeDtypeStruct((9,), np.float32)
    finite = jax.ShapeDtypeStruct((), bool)
    compiled = update.lower(state, grads, nine, scalar, finite).compile()
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == size
