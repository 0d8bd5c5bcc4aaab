"""Steps that are skipped or fail: what stays, and what is demanded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sojax
from sojax.graph.graph import TaskKind
from sojax.models.gpt import GPT, GPTConfig
from sojax.models.stage import Stage
from tests.training import (
  VOCAB_SIZE,
  assert_same_bits,
  batches,
  small_gpt,
  state_of,
  trainer,
)


@jax.custom_vjp
def poisoned(table, tokens):
  """Is the table; its gradient gets one Inf if token 255 occurs."""
  return table


poisoned.defvjp(
  lambda table, tokens: (table, tokens),
  lambda tokens, g: (
    g.at[3, 5].set(jnp.where(jnp.any(tokens == 255), jnp.inf, g[3, 5])),
    None,
  ),
)


class PoisonedEmbed(nnx.Module):
  """The first stage of a GPT, wrapped."""

  def __init__(self, inner):
    self.inner = inner
    self.table = nnx.Param(jnp.ones((8, 8)))

  def __call__(self, tokens):
    x = self.inner(tokens)
    table = poisoned(self.table[...], tokens)
    return x * (1 + 1e-3 * jnp.mean(table)).astype(x.dtype)


class PoisonedGPT(nnx.Module):
  """A GPT whose gradient has one Inf for batches with token 255."""

  def __init__(self, **changes):
    self.gpt = GPT(
      GPTConfig(
        vocab_size=VOCAB_SIZE,
        num_layers=2,
        hidden_dim=64,
        num_heads=2,
        max_seq_len=32,
        **changes,
      ),
      rngs=nnx.Rngs(0),
    )
    first, *_ = self.gpt.stages()
    self.first = PoisonedEmbed(first.module)

  def stages(self):
    first, *rest = self.gpt.stages()
    return [Stage(name=first.name, module=self.first), *rest]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
  "plan",
  [
    {},
    {"bucket_bytes": 1 << 16, "device_buckets": 2},
    {"weights": "flow"},
    {"activations": ("keep", "offload", "keep", "recompute")},
    {"accumulate": "host"},
    {"accumulate": "host", "bucket_bytes": 1 << 16, "device_buckets": 2},
  ],
  ids=str,
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_inf_skips_the_step_and_leaves_no_trace(
  precision, plan, accumulation
):
  data = batches(4, rows=4 * accumulation)
  for batch in data:
    batch["tokens"] %= 255
  bad = {"tokens": data[0]["tokens"].copy()}
  bad["tokens"][-1, 2] = 255

  def start():
    return trainer(
      plan,
      model=PoisonedGPT(),
      precision=precision,
      accumulation=accumulation,
    )

  with start() as ours, start() as never_saw:
    for batch in data[:2]:
      ours.step(batch)
      never_saw.step(batch)
    before = state_of(ours)
    metrics = ours.step(bad)
    assert metrics.skipped and not metrics.clipped
    assert not np.isfinite(metrics.grad_norm)
    after = state_of(ours)
    assert after.pop("num_steps") == before.pop("num_steps") + 1
    assert_same_bits(after, before)
    for batch in data[2:]:
      assert not ours.step(batch).skipped
      never_saw.step(batch)
    ours_, theirs = state_of(ours), state_of(never_saw)
    assert ours_.pop("num_steps") == theirs.pop("num_steps") + 1
    assert_same_bits(ours_, theirs)


@pytest.mark.parametrize("activations", ["recompute", "keep", "offload"])
def test_a_skipped_step_takes_dropout_keys_back(activations):
  data = batches(3)
  for batch in data:
    batch["tokens"] %= 255
  bad = {"tokens": data[0]["tokens"].copy()}
  bad["tokens"][0, 0] = 255
  plan = {"activations": activations}
  with trainer(plan, model=PoisonedGPT(dropout=0.2)) as ours:
    ours.step(data[0])
    before = state_of(ours)
    assert any("rng" in name for name in before)
    assert ours.step(bad).skipped
    after = state_of(ours)
    del before["num_steps"], after["num_steps"]
    assert_same_bits(after, before)
    ours.step(data[1])
    changed = state_of(ours)
    counts = [name for name in before if "count" in name and "rng" in name]
    assert counts
    assert all(before[n].tobytes() != changed[n].tobytes() for n in counts)


class Broken(RuntimeError):
  """What the tests raise."""


def break_once(ours, kind):
  """Makes the next task of a kind fail when it is issued."""
  action = ours._executor._actions[kind]

  def fail(task, step):
    ours._executor._actions[kind] = action
    raise Broken(task.name)

  ours._executor._actions[kind] = fail


def break_the_program(ours):
  """Makes the next dispatch of a device update fail."""
  updates = ours._executor._actions[TaskKind.DEVICE_UPDATE].__self__
  update = updates._update

  def fail(*args):
    updates._update = update
    raise Broken("device update")

  updates._update = fail


BEFORE_VALIDATE = [
  (TaskKind.FORWARD, {}),
  (TaskKind.BACKWARD, {}),
  (TaskKind.GRAD_OUT, {}),
  (TaskKind.VALIDATE, {}),
  (TaskKind.HOST_ACCUMULATE, {"accumulate": "host"}),
  (TaskKind.VALIDATE, {"accumulate": "host"}),
  (TaskKind.BACKWARD, {"activations": "keep"}),
  (TaskKind.ACTIVATION_OUT, {"activations": "offload"}),
  (TaskKind.ACTIVATION_IN, {"activations": "offload", "weights": "flow"}),
]


@pytest.mark.parametrize(("kind", "plan"), BEFORE_VALIDATE, ids=str)
def test_a_failure_before_validate_loses_nothing(kind, plan):
  data = batches(5)
  model = {"dropout": 0.1}
  with (
    trainer(plan, model=small_gpt(**model)) as ours,
    trainer(plan, model=small_gpt(**model)) as theirs,
  ):
    for batch in data[:2]:
      ours.step(batch)
    break_once(ours, kind)
    with pytest.raises(sojax.StepError, match="step 2 failed") as caught:
      ours.step(data[2])
      ours.drain()
    assert caught.value.intact
    for batch in data[2:]:
      ours.step(batch)
    for batch in data:
      theirs.step(batch)
    assert_same_bits(state_of(ours), state_of(theirs))


@pytest.mark.parametrize(
  ("kind", "plan"),
  [
    (TaskKind.HOST_UPDATE, {}),
    (TaskKind.HOST_UPDATE, {"weights": "flow"}),
    (TaskKind.HOST_UPDATE, {"accumulate": "host"}),
    (TaskKind.WEIGHT_IN, {"ring_slots": 1, "bucket_bytes": 1 << 16}),
    (TaskKind.DEVICE_UPDATE, {"device_buckets": 1}),
  ],
  ids=str,
)
def test_a_failure_after_validate_demands_a_restore(tmp_path, kind, plan):
  data = batches(5)
  with trainer(plan) as ours, trainer(plan) as theirs:
    for batch in data[:2]:
      ours.step(batch)
    ours.save(tmp_path)
    if kind is TaskKind.DEVICE_UPDATE:
      break_the_program(ours)
    else:
      break_once(ours, kind)
    with pytest.raises(sojax.StepError) as caught:
      for batch in data[2:]:
        ours.step(batch)
      ours.drain()
    assert isinstance(caught.value.__cause__, Broken)
    for call in (
      lambda: ours.step(data[2]),
      ours.drain,
      lambda: ours.save(tmp_path),
      lambda: ours.evaluate(data[2]),
    ):
      with pytest.raises(sojax.StepError, match="restore a checkpoint"):
        call()
    ours.restore(tmp_path)
    for batch in data[2:]:
      ours.step(batch)
    for batch in data:
      theirs.step(batch)
    assert_same_bits(state_of(ours), state_of(theirs))


def test_reading_the_metrics_of_a_failed_step_raises():
  with trainer() as ours:
    break_once(ours, TaskKind.HOST_UPDATE)
    metrics = ours.step(batches(1)[0])
    with pytest.raises(sojax.StepError, match="step 0 failed in .host_update"):
      _ = metrics.exposed_host_s
    assert metrics.loss > 0  # it had been computed before


def test_a_failure_while_weights_are_unpacked_leaves_none_stale(monkeypatch):
  data = batches(3)
  with trainer() as ours, trainer() as theirs:
    ours.step(data[0])
    ours.drain()
    unpacker = ours._parts.weights._parameters._unpacker
    monkeypatch.setattr(
      unpacker, "unpack", lambda *args: (_ for _ in ()).throw(Broken("unpack"))
    )
    with pytest.raises(sojax.StepError) as caught:
      ours.step(data[1])
    assert caught.value.intact
    monkeypatch.undo()
    for batch in data[1:]:
      ours.step(batch)
    for batch in data:
      theirs.step(batch)
    assert_same_bits(state_of(ours), state_of(theirs))
