"""Where weights are does not change a bit. Oracle: all of them stationary."""

import numpy as np
import pytest

import sojax
from sojax.graph.graph import TaskKind
from tests.speculating import (
  let_all_run_ahead,
  spiking_batches,
  trainer,
)
from tests.training import assert_same_bits, mesh_of, state_of

S, F, ONCE = "stationary", "flow", "flow_once"

# Embed, two blocks and a head, which borrows embed's table.
MIXES = [
  (S, F, S, F),
  (F, S, ONCE, S),
  (ONCE, S, F, ONCE),
  ONCE,
]


def run(plan, *, accumulation=1, num_devices=1, num_steps=5, **changes):
  """Trains; one step is clipped a thousandfold, one is skipped."""
  data = spiking_batches(
    num_steps, spikes=[1], infinite=[3], rows=4 * accumulation
  )
  mesh = mesh_of(num_devices) if num_devices > 1 else None
  changes |= {"micro_batch": 4 // num_devices, "accumulation": accumulation}
  with trainer(plan, mesh=mesh, **changes) as ours:
    metrics = [ours.step(batch) for batch in data]
    outcome = {
      "loss": np.array([m.loss for m in metrics]),
      "grad_norm": np.array([m.grad_norm for m in metrics]),
      "evaluation": np.array(ours.evaluate(data[0])),
      **state_of(ours),
    }
    assert [m.skipped for m in metrics] == [n == 3 for n in range(num_steps)]
    assert metrics[1].grad_norm > 10 > 1 == ours.config.clip_norm
  return outcome


@pytest.fixture(scope="module")
def stationary():
  """Outcomes of plans without a mix, once they are known."""
  return {}


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize(
  ("plan", "changes"),
  [
    ({}, {}),
    ({"ring_slots": 1}, {"precision": "bf16"}),
    ({"master": "split"}, {"precision": "bf16"}),
    ({"weight_cast": "device"}, {"precision": "bf16"}),
    ({}, {"accumulation": 2}),
    ({"accumulate": "host", "flow_window": 3}, {"accumulation": 2}),
    ({"flow_window": 99}, {"accumulation": 2}),
    ({"activations": "offload"}, {}),
    ({"activations": "keep"}, {"precision": "bf16"}),
    ({"gradients_out": "callback"}, {"precision": "bf16"}),
    ({"park": "device"}, {}),
    ({"weight_cast": "device"}, {"num_devices": 2, "precision": "bf16"}),
  ],
  ids=str,
)
def test_every_mix_has_the_bits_of_weight_stationary(
  mix, plan, changes, stationary
):
  key = repr((plan, changes))
  if key not in stationary:
    stationary[key] = run(plan, **changes)
  ours = run({"weights": mix, **plan}, **changes)
  assert_same_bits(ours, stationary[key])


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize(
  ("scheme", "master"),
  [("record3", "fp32"), ("record3", "split"), ("pingpong", "fp32")],
)
def test_updates_that_are_taken_back_leave_every_mix_its_weights(
  mix, scheme, master, monkeypatch
):
  """What flows has been written in place, what stays has been sent again."""
  ahead = {"speculation": scheme, "speculate": "always", "master": master}
  data = spiking_batches(5, spikes=[1, 4], infinite=[2])

  def trained(plan):
    with trainer(plan, precision="bf16") as ours:
      if "speculation" in plan:
        let_all_run_ahead(ours, monkeypatch)
      metrics = [ours.step(batch) for batch in data]
      losses = np.array([m.loss for m in metrics])
      taken_back = [m.redone for m in metrics]
      return {"loss": losses, **state_of(ours)}, taken_back

  theirs, _ = trained({"master": master})
  ours, taken_back = trained({"weights": mix, **ahead})
  assert taken_back[1] and taken_back[4]
  assert_same_bits(ours, theirs)


@pytest.mark.parametrize("mix", [(S, S, F, ONCE), (S, ONCE, ONCE, F)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_device_buckets_of_stationary_stages_go_with_others_that_flow(
  mix, precision
):
  plan = {"device_buckets": 1}
  theirs = run(plan, precision=precision)
  assert_same_bits(run({"weights": mix, **plan}, precision=precision), theirs)


@pytest.mark.parametrize("before", [S, *MIXES[:2]], ids=str)
@pytest.mark.parametrize("after", [S, *MIXES[1:3]], ids=str)
def test_a_checkpoint_resumes_wherever_weights_are(tmp_path, before, after):
  data = spiking_batches(6)
  with trainer({"weights": before}) as first:
    for batch in data[:3]:
      first.step(batch)
    first.save(tmp_path)
    for batch in data[3:]:
      first.step(batch)
    expected = state_of(first)
  with trainer({"weights": after}) as second:
    second.step(data[5])  # what it has seen before must not matter
    second.restore(tmp_path)
    for batch in data[3:]:
      second.step(batch)
    assert_same_bits(state_of(second), expected)


class Broken(Exception):
  pass


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize(
  "kind", [TaskKind.WEIGHT_IN, TaskKind.FORWARD, TaskKind.BACKWARD], ids=str
)
def test_a_step_that_fails_before_validate_leaves_the_state(mix, kind):
  """What had flowed in for it, and was to stay, is gone as well."""
  data = spiking_batches(4)
  with trainer({"weights": mix}) as ours, trainer({"weights": mix}) as theirs:
    ours.step(data[0])
    ours.drain()
    actions = ours._executor._actions
    action = actions[kind]
    seen = []

    def breaking(task, step):
      seen.append(step)
      if len(seen) == 3:
        raise Broken
      return action(task, step)

    actions[kind] = breaking
    with pytest.raises(sojax.StepError) as caught:
      ours.step(data[1])
    assert caught.value.intact
    actions[kind] = action
    for batch in data[1:]:
      ours.step(batch)
    assert not seen[2].params and not seen[2].fetched
    for batch in data:
      theirs.step(batch)
    assert_same_bits(state_of(ours), state_of(theirs))
