"""What tasks cost. Oracle: figures worked by hand on a round machine."""

import dataclasses

import pytest

from sojax.plan.adamw import adamw
from sojax.plan.buckets import Leaf, ModelShape
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Cost, Costs, StageSeconds
from sojax.plan.hardware import (
  HOST_OPERATIONS,
  Curve,
  HardwareProfile,
  Resource,
)
from sojax.plan.plan import MIB, Plan
from sojax.plan.workload import StageWork, Workload

ELEMS = MIB
"""Parameters of each stage: a bucket of one unit of 2 MiB in bfloat16."""

RATES = {
  operation: (number + 1) * 1e9
  for number, operation in enumerate(HOST_OPERATIONS)
}
"""Bytes/s of each operation, each another."""

MACHINE = HardwareProfile(
  name="round",
  device_flops={"bfloat16": 1e12},
  efficiency=Curve(((1e9, 0.25), (1e12, 0.5))),
  device_bytes=1 << 36,
  device_bandwidth=1e11,
  d2h=Curve(((2.0 * MIB, 2e9), (4.0 * MIB, 4e9))),
  h2d=Curve(((2.0 * MIB, 1e9), (4.0 * MIB, 3e9))),
  d2h_pageable=Curve.flat(1e9),
  h2d_pageable=Curve.flat(1e9),
  host_bytes=1 << 36,
  host_bandwidth=1e10,
  host_cores=8,
  host_rates={
    operation: Curve(((1.0, rate / 8), (8.0, rate)))
    for operation, rate in RATES.items()
  },
  dispatch_s=1e-5,
  network_bandwidth=1e9,
  host_task_s=0.0,
  network_latency_s=1e-3,
)


def workload(num_ranks=1, elems=ELEMS):
  """Three stages of a parameter each, of which the middle one computes most."""
  works = [
    StageWork(
      input_bytes=100,
      kept_bytes=1000,
      forward_flops=flops,
      backward_flops=2 * flops,
      recompute_flops=recompute,
      forward_bytes=num_bytes,
      backward_bytes=2 * num_bytes,
    )
    for flops, recompute, num_bytes in (
      (0.0, None, 1e9),
      (1e12, 5e11, 1e9),
      (1e9, None, 2e9),
    )
  ]
  leaves = [
    Leaf(name=f"s{i}.w", stage=i, shape=(elems,), group=0) for i in range(3)
  ]
  return Workload(
    model=ModelShape(
      stage_names=("s0", "s1", "s2"),
      leaves=tuple(leaves),
      borrowed=((), (), ()),
      groups=(adamw(1e-3),),
    ),
    backward_order=(0, 1, 2),
    stages=tuple(works),
    num_ranks=num_ranks,
  )


def costs(
  accumulation=1,
  num_ranks=1,
  elems=ELEMS,
  profile=MACHINE,
  stage_seconds=None,
  precision="bf16",
  **switches,
):
  plan = Plan(**switches)
  config = TrainConfig(
    micro_batch=1, seq_len=8, accumulation=accumulation, precision=precision
  )
  work = workload(num_ranks, elems)
  layout = work.layout(plan, config)
  return Costs(layout, plan, config, work, profile, stage_seconds=stage_seconds)


def host_seconds(operation, bytes_per_elem):
  return pytest.approx(bytes_per_elem * ELEMS / RATES[operation])


def test_a_forward_is_bound_by_flops_or_by_bytes():
  # 1e12 FLOPs at half of 1e12 FLOP/s; 1e9 bytes at 1e11 bytes/s.
  assert costs().forward(1) == Cost(2.0, {Resource.DEVICE_MEMORY: 1e9})
  assert costs().forward(0) == Cost(0.01, {Resource.DEVICE_MEMORY: 1e9})


def test_efficiency_is_that_of_a_programs_flops():
  # 2e12 + 5e11 FLOPs, past the curve's end.
  assert costs().backward(1, True).seconds == pytest.approx(2.5e12 / 5e11)
  # 3e9 FLOPs take less than 12 ms, 6e9 bytes 60.
  assert costs().backward(2, True).seconds == pytest.approx(
    (6e9 + 4 * ELEMS) / 1e11
  )


@pytest.mark.parametrize(
  ("activations", "flops", "num_bytes"),
  [("recompute", 2.5e12, 3e9), ("offload", 2.5e12, 3e9), ("keep", 2e12, 2e9)],
)
def test_a_backward_computes_again_what_was_not_kept(
  activations, flops, num_bytes
):
  cost = costs(activations=activations).backward(1, True)
  assert cost.seconds == pytest.approx(flops / 5e11)
  # Gradients in bfloat16 are read and written once more as they leave.
  moved = cost.uses[Resource.DEVICE_MEMORY]
  assert moved == pytest.approx(num_bytes + 4 * ELEMS)


def test_all_of_forward_is_computed_again_where_nothing_else_is_said():
  ours = costs()
  moved = ours.backward(0, True).uses[Resource.DEVICE_MEMORY]
  assert moved == pytest.approx(3e9 + 4 * ELEMS)
  ours._workload = dataclasses.replace(
    ours._workload,
    stages=tuple(
      dataclasses.replace(stage, recompute_flops=None)
      for stage in ours._workload.stages
    ),
  )
  assert ours.backward(1, True).seconds == pytest.approx(3e12 / 5e11)


def test_the_last_stages_backward_is_its_forward_too_whatever_is_kept():
  for activations in ("recompute", "keep"):
    moved = costs(activations=activations).backward(2, True).uses
    assert moved[Resource.DEVICE_MEMORY] == pytest.approx(6e9 + 4 * ELEMS)


def test_sums_of_micro_batches_on_the_device_are_read_and_written():
  ours = costs(accumulation=3)
  first, last = ours.backward(0, False), ours.backward(0, True)
  assert first.uses[Resource.DEVICE_MEMORY] == pytest.approx(3e9 + 8 * ELEMS)
  assert last.uses[Resource.DEVICE_MEMORY] == pytest.approx(3e9 + 12 * ELEMS)
  on_host = costs(accumulation=3, accumulate="host").backward(0, False)
  assert on_host.uses[Resource.DEVICE_MEMORY] == pytest.approx(3e9 + 4 * ELEMS)


def test_casts_on_the_device_move_its_memory():
  ours = costs(accumulation=2, grad_cast="device", weight_cast="device")
  forward = ours.forward(0).uses[Resource.DEVICE_MEMORY]
  assert forward == pytest.approx(1e9 + 6 * ELEMS)
  again = ours.forward(0, first_micro=False).uses[Resource.DEVICE_MEMORY]
  assert again == 1e9
  last = ours.backward(0, True).uses[Resource.DEVICE_MEMORY]
  assert last == pytest.approx(3e9 + (8 + 2 + 4) * ELEMS)


def test_weights_that_flow_are_rounded_at_each_use():
  ours = costs(weights="flow", weight_cast="device")
  again = ours.forward(0, first_micro=False).uses[Resource.DEVICE_MEMORY]
  assert again == pytest.approx(1e9 + 6 * ELEMS)
  backward = ours.backward(0, True).uses[Resource.DEVICE_MEMORY]
  assert backward == pytest.approx(3e9 + (6 + 4) * ELEMS)


def test_weights_of_a_mix_are_rounded_when_they_have_come():
  """Stage 0's once a micro-batch, 1's once a step, 2's at its only use."""
  mix = ("flow_once", "stationary", "flow")
  ours = costs(weights=mix, weight_cast="device")
  plain = costs(weights=mix)

  def rounded(use, *args, **kwargs):
    found = getattr(ours, use)(*args, **kwargs).uses[Resource.DEVICE_MEMORY]
    without = getattr(plain, use)(*args, **kwargs).uses[Resource.DEVICE_MEMORY]
    return (found - without) / (6 * ELEMS)

  assert rounded("forward", 0, first_micro=False) == pytest.approx(1)
  assert rounded("backward", 0, True) == 0
  assert rounded("forward", 1) == pytest.approx(1)
  assert rounded("forward", 1, first_micro=False) == 0
  assert rounded("backward", 1, True) == 0
  assert rounded("backward", 2, True) == pytest.approx(1)


def test_measured_seconds_replace_those_of_flops_but_not_bytes():
  measured = StageSeconds(forward=(1.0, 2.0, 3.0), backward=(4.0, 5.0, 6.0))
  ours = costs(stage_seconds=measured)
  assert ours.forward(1).seconds == 2.0
  assert ours.backward(2, True).seconds == 6.0
  assert ours.forward(1).uses == costs().forward(1).uses


def test_a_transfer_takes_the_bandwidth_of_its_size():
  out, back = costs().grad_out(0), costs().weight_in(0)
  assert out.seconds == pytest.approx(2 * MIB / 2e9)
  assert back.seconds == pytest.approx(2 * MIB / 1e9)
  for cost in (out, back):
    assert cost.uses == {
      Resource.HOST_MEMORY: 2 * MIB,
      Resource.DEVICE_MEMORY: 2 * MIB,
    }
  wide = costs(grad_cast="device", weight_cast="device")
  assert wide.grad_out(0).seconds == pytest.approx(4 * MIB / 4e9)
  assert wide.weight_in(0).seconds == pytest.approx(4 * MIB / 3e9)


def test_a_bucket_is_one_transfer_for_each_unit():
  work = workload()
  shapes = ((ELEMS,), (2 * ELEMS,))
  leaves = tuple(
    Leaf(name=f"s0.{i}", stage=0, shape=shape, group=0)
    for i, shape in enumerate(shapes)
  )
  model = ModelShape(
    stage_names=("s0",),
    leaves=leaves,
    borrowed=((),),
    groups=work.model.groups,
  )
  one = Workload(model=model, backward_order=(0, 1), stages=work.stages[:1])
  plan = Plan()
  config = TrainConfig(micro_batch=1, seq_len=8, precision="bf16")
  layout = one.layout(plan, config)
  assert [len(bucket.units) for bucket in layout.buckets] == [2]
  ours = Costs(layout, plan, config, one, MACHINE)
  assert ours.grad_out(0).seconds == pytest.approx(
    2 * MIB / 2e9 + 4 * MIB / 4e9
  )


def test_stage_inputs_move_in_one_piece():
  ours = costs(activations="offload")
  assert ours.activation(1, out=True).seconds == pytest.approx(100 / 2e9)
  assert ours.activation(1, out=False).seconds == pytest.approx(100 / 1e9)


@pytest.mark.parametrize(
  ("switches", "operation", "bytes_per_elem"),
  [
    ({}, "step", 28),
    ({"grad_cast": "device"}, "step", 30),
    ({"grad_cast": "device", "weight_cast": "device"}, "step", 32),
    ({"master": "split"}, "step", 26),
    ({"accumulate": "host"}, "step", 30),
    ({"speculation": "record2"}, "record2", 30),
    ({"speculation": "record3"}, "record3", 31),
    ({"speculation": "record3", "master": "split"}, "record3", 29),
  ],
)
def test_an_update_moves_what_the_table_says(
  switches, operation, bytes_per_elem
):
  ahead = operation != "step"
  cost = costs(**switches).host_update(0, ahead=ahead)
  assert cost.seconds == host_seconds(operation, bytes_per_elem)
  assert cost.uses == {
    Resource.HOST_MEMORY: bytes_per_elem * ELEMS,
    Resource.HOST_CORES: pytest.approx(8 * cost.seconds),
  }


def test_casts_of_their_own_are_passes_before_and_after_a_step():
  parts = 28 * ELEMS / RATES["step"] + 6 * ELEMS / RATES["narrow"]
  both = costs(grad_cast="host_separate", weight_cast="host_separate")
  assert both.host_update(0, ahead=False).seconds == pytest.approx(
    parts + 6 * ELEMS / RATES["widen"]
  )
  # The step still writes the weights that cross the link.
  wide = costs(grad_cast="host_separate").host_update(0, ahead=False)
  assert wide.seconds == pytest.approx(
    30 * ELEMS / RATES["step"] + 6 * ELEMS / RATES["widen"]
  )


def test_an_update_with_copies_is_a_copy_and_a_step():
  ours = costs(speculation="pingpong")
  parts = 24 * ELEMS / RATES["copy"] + 28 * ELEMS / RATES["step"]
  assert ours.host_update(0, ahead=True).seconds == pytest.approx(parts)
  assert ours.host_update(0, ahead=False).seconds == host_seconds("step", 28)
  assert ours.host_settle(0, "redo").seconds == host_seconds("step", 28)
  assert ours.host_settle(0, "undo").seconds == host_seconds("narrow", 6)


def test_settling_costs_what_is_done():
  ours = costs(speculation="record3")
  assert ours.host_settle(0, "commit") == Cost(1e-5)
  assert ours.host_settle(0, "late").seconds == host_seconds("step", 28)
  assert ours.host_settle(0, "redo").seconds == host_seconds("redo", 31)
  parts = 29 * ELEMS / RATES["undo"] + 6 * ELEMS / RATES["narrow"]
  assert ours.host_settle(0, "undo").seconds == pytest.approx(parts)
  split = costs(speculation="record2", master="split")
  assert split.host_settle(0, "undo").seconds == host_seconds("undo", 28)
  assert split.host_settle(0, "redo").seconds == host_seconds("redo", 28)


def test_sums_on_the_host_begin_with_a_copy_and_go_on():
  ours = costs(accumulate="host", accumulation=2)
  first = ours.host_accumulate(0, first_micro=True)
  assert first.seconds == host_seconds("widen", 6)
  second = ours.host_accumulate(0, first_micro=False)
  assert second.seconds == host_seconds("accumulate", 10)


@pytest.mark.parametrize(
  ("switches", "threads"),
  [({"pool_threads": 1}, 1), ({"pool_cores": (2,)}, 1), ({}, 8)],
)
def test_fewer_threads_take_longer(switches, threads):
  cost = costs(**switches).host_update(0, ahead=False)
  assert cost.seconds == pytest.approx(28 * ELEMS * 8 / threads / RATES["step"])
  cores = cost.uses[Resource.HOST_CORES]
  assert cores == pytest.approx(cost.seconds * threads)


def test_a_pool_has_no_more_threads_than_the_machine_has_cores():
  assert costs(pool_threads=99).host_update(
    0, ahead=False
  ) == costs().host_update(0, ahead=False)


def test_a_device_update_moves_the_devices_memory():
  cost = costs(device_buckets=1).device_update(2)
  assert cost.seconds == pytest.approx(28 * ELEMS / 1e11)
  assert cost.uses == {Resource.DEVICE_MEMORY: 28 * ELEMS}


def test_a_device_that_is_the_host_takes_its_cores_and_memory():
  profile = dataclasses.replace(MACHINE, device_is_host=True)
  assert costs(profile=profile).forward(1).uses == {
    Resource.DEVICE_MEMORY: 1e9,
    Resource.HOST_MEMORY: 1e9,
    Resource.HOST_CORES: 16.0,
  }
  for move in (
    costs(profile=profile).grad_out,
    costs(profile=profile).weight_in,
  ):
    assert move(0).uses[Resource.HOST_CORES] == move(0).seconds  # one core


def test_the_runtime_takes_cores_for_every_task_where_programs_run_on_them():
  """Sixteen core seconds of a forward, and half a one of the runtime."""
  alone = dataclasses.replace(MACHINE, host_task_s=0.5)
  shared = dataclasses.replace(alone, device_is_host=True)
  assert Resource.HOST_CORES not in costs(profile=alone).forward(1).uses
  ours = costs(profile=shared)
  assert ours.forward(1).uses[Resource.HOST_CORES] == 16.5
  for cost in (ours.grad_out(0), ours.weight_in(0)):
    assert cost.uses[Resource.HOST_CORES] == cost.seconds + 0.5
  for cost in (ours.validate(), ours.host_scalars(), ours.host_settle(0)):
    assert cost.seconds == MACHINE.dispatch_s
    assert cost.uses[Resource.HOST_CORES] == 0.5
  free = dataclasses.replace(shared, dispatch_s=0.0)
  assert costs(profile=free).validate() == Cost(0.0)


def test_ranks_share_buckets_and_pass_rings():
  ours = costs(num_ranks=4)
  assert ours.host_update(0, ahead=False).seconds == pytest.approx(
    28 * ELEMS / 4 / RATES["step"]
  )
  out = ours.grad_out(0)
  assert out.uses[Resource.HOST_MEMORY] == 2 * MIB / 4
  assert out.seconds == pytest.approx(2 * MIB / 4 / 2e9)
  ring = ours.all_gather(4e6)
  assert ring.seconds == pytest.approx(3e6 / 1e9 + 1e-3)
  assert ring == ours.reduce_scatter(4e6)


def test_small_programs_take_a_dispatch():
  assert costs().validate() == costs().host_scalars() == Cost(1e-5)


def test_what_does_not_fit_is_refused():
  with pytest.raises(ValueError, match="'round' has no FLOP/s of float16"):
    costs(precision="fp16")
  with pytest.raises(ValueError, match="backward is of 1 stages, .* has 3"):
    costs(stage_seconds=StageSeconds(forward=(1.0,) * 3, backward=(1.0,)))
