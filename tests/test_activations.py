"""What stages leave for backward: kept, offloaded, or recomputed from inputs.

Recomputing is the slow twin: docs/design.md promises its bits to offloading.
"""

import dataclasses

import jax
import numpy as np
import pytest

from sojax.graph.graph import TaskKind
from sojax.plan.account import Account
from sojax.runtime.run import StepError
from tests.test_trainer_failures import break_once
from tests.training import (
  SEQ_LEN,
  assert_same_bits,
  batches,
  record,
  small_gpt,
  state_of,
  trainer,
)

pytestmark = pytest.mark.usefixtures("no_garbage")

K = TaskKind
MIXED = ("keep", "offload", "recompute", "keep", "offload")
"""For a GPT of three blocks, with its embedding and its head."""


# Bits.


def run(plan, *, num_steps=4, accumulation=1, **changes):
  model = small_gpt(num_layers=3, dropout=0.1)
  ours = trainer(plan, model=model, accumulation=accumulation, **changes)
  with ours:
    data = batches(num_steps, rows=4 * accumulation)
    metrics = [ours.step(batch) for batch in data]
    return {
      "loss": np.array([m.loss for m in metrics]),
      "grad_norm": np.array([m.grad_norm for m in metrics]),
      **state_of(ours),
    }


@pytest.mark.parametrize("weights", ["stationary", "flow"])
@pytest.mark.parametrize(
  ("accumulation", "precision"),
  [(1, "fp32"), pytest.param(3, "bf16", marks=pytest.mark.slow)],
)
def test_offloading_has_the_bits_of_recomputing(
  weights, accumulation, precision
):
  changes = {"accumulation": accumulation, "precision": precision}
  ours = run({"activations": "offload", "weights": weights}, **changes)
  assert_same_bits(ours, run({}, **changes))


@pytest.mark.slow
def test_weights_that_flow_do_not_change_the_bits_of_mixed_policies():
  """Nor do bucket cuts: parameters are fetched again for what needs them."""
  plan = {"activations": MIXED}
  changes = {"accumulation": 2}
  flow = {"weights": "flow", "bucket_bytes": 1 << 16}
  assert_same_bits(run(plan | flow, **changes), run(plan, **changes))


@pytest.mark.parametrize("activations", ["keep", MIXED], ids=str)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_keeping_has_the_gradients_of_recomputing(activations, accumulation):
  """Both start from the same state, with dropout. Bound: that of the
  comparison with optax, every element against length * eps of its leaf."""
  model = {"num_layers": 3, "dropout": 0.1}
  changes = {"accumulation": accumulation}
  (batch,) = batches(1, rows=4 * accumulation)
  seen = []
  for plan in ({"activations": activations}, {}):
    with trainer(plan, model=small_gpt(**model), **changes) as ours:
      steps = record(ours)
      loss = ours.step(batch).loss
      state = state_of(ours)
      seen.append((steps[0].grads, loss, state))
  (grads, loss, state), (expected, expected_loss, expected_state) = seen
  length = 4 * SEQ_LEN * accumulation + 3 * (12 * 64 + 2 * SEQ_LEN) + 64
  slack = length * 2.0**-24
  assert loss == pytest.approx(expected_loss, rel=slack)
  assert grads.keys() == expected.keys()
  for name, grad in grads.items():
    error = np.abs(grad - expected[name]).max()
    assert error <= slack * np.abs(expected[name]).max(), name
  counts = [name for name in state if "rng" in name]
  assert counts
  for name in counts:
    assert state[name].tobytes() == expected_state[name].tobytes(), name


def test_a_failed_step_lets_go_of_what_forward_left():
  (batch,) = batches(1)
  with trainer({"activations": MIXED}, model=small_gpt(num_layers=3)) as ours:
    break_once(ours, K.BACKWARD)
    with pytest.raises(StepError) as caught:
      ours.step(batch)
    step = caught.value.data
    assert not (step.inputs or step.kept or step.offloaded or step.other_into)


# Memory.

ROWS, NUM_LAYERS = 32, 8
INPUT_SHAPE = (ROWS, SEQ_LEN, 64)
INPUT_BYTES = 4 * ROWS * SEQ_LEN * 64


def on_device():
  return [
    array
    for array in jax.live_arrays()
    if array.sharding.memory_kind == "device"
  ]


@dataclasses.dataclass
class Peaks:
  """The most there was in a step, sampled after each task's issue."""

  account: Account
  device_bytes: int = 0  # over what was there before the step
  num_inputs: int = 0  # arrays of that shape: inputs, outputs, cotangents
  offloaded_bytes: int = 0

  def sample(self, before, step):
    live = on_device()
    used = sum(array.nbytes for array in live) - before
    shaped = sum(array.shape == INPUT_SHAPE for array in live)
    offloaded = sum(array.nbytes for array in step.offloaded.values())
    self.device_bytes = max(self.device_bytes, used)
    self.num_inputs = max(self.num_inputs, shaped)
    self.offloaded_bytes = max(self.offloaded_bytes, offloaded)


def peaks(**plan):
  model = small_gpt(num_layers=NUM_LAYERS)
  with trainer(plan, model=model, micro_batch=ROWS) as ours:
    data = batches(2, rows=ROWS)
    ours.step(data[0])
    ours.drain()
    before = sum(array.nbytes for array in on_device())
    seen = Peaks(ours.account)
    for kind, action in list(ours._executor._actions.items()):

      def sampling(task, step, action=action):
        wait = action(task, step)
        seen.sample(before, step)
        if task.kind is K.ACTIVATION_IN:
          assert task.stage not in step.offloaded
          fetched = step.inputs[task.stage]
          assert fetched.sharding.memory_kind == "device"
        if task.kind is K.ACTIVATION_OUT:
          on_host = step.offloaded[task.stage]
          assert on_host.sharding.memory_kind == "pinned_host"
        return wait

      ours._executor._actions[kind] = sampling
    ours.step(data[1])
    ours.drain()
  return seen


@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_keeping_takes_more_than_recomputing_and_that_more_than_offloading(
  weights,
):
  """Live figures, and by as much as the account says. Kept residuals do not
  need a block's input, which the account counts as it may still be read."""
  keep, recompute, offload = (
    peaks(activations=policy, weights=weights)
    for policy in ("keep", "recompute", "offload")
  )
  inputs = recompute.account.device["stage_inputs"]
  more = keep.account.device["residuals"] - inputs
  assert keep.device_bytes - recompute.device_bytes >= more > 10 * inputs
  less = inputs - offload.account.device["stage_inputs"]
  assert recompute.device_bytes - offload.device_bytes >= less
  assert less == (NUM_LAYERS - 4) * INPUT_BYTES
  # The cotangent of an output becomes that of the input.
  assert recompute.num_inputs >= NUM_LAYERS + 1
  assert offload.num_inputs <= 4 + 1 + 2
  for seen in (keep, recompute, offload):
    assert seen.offloaded_bytes == seen.account.host["stage_inputs"]
    cotangents = 2 * INPUT_BYTES
    assert seen.device_bytes <= seen.account.device_bytes + cotangents
