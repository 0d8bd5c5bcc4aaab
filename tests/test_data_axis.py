"""Several emulated devices, each with a shard of everything (ZeRO)."""

import jax
import numpy as np
import pytest
from flax import nnx

import sojax
from sojax.reference.loop import Loop
from tests.exactness import check_teacher_forced, optax_adamw
from tests.training import (
  ROWS,
  VOCAB_SIZE,
  assert_same_bits,
  batches,
  config,
  live_arrays_besides,
  mesh_of,
  on_ranks,
  ragged,
  small_gpt,
  state_of,
  trainer,
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_devices", [4, 8])
@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_teacher_forced_gradients_and_updates_match_optax(
  weights, num_devices, precision
):
  ours = on_ranks(num_devices, {"weights": weights}, precision=precision)
  whole = config(micro_batch=ROWS, precision=precision)
  with ours:
    theirs = Loop(small_gpt(), optax_adamw(), whole)
    check_teacher_forced(ours, theirs, num_steps=10)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_devices", [4, 8])
def test_losses_are_those_of_one_device(num_devices, accumulation):
  """Sums over rows in another order: as between staged and plain programs."""
  data = batches(20, rows=ROWS * accumulation)
  with trainer(micro_batch=ROWS, accumulation=accumulation) as one:
    expected = [one.step(batch).loss for batch in data]
    evaluated = one.evaluate(data[0])
  with on_ranks(num_devices, accumulation=accumulation) as ours:
    losses = [ours.step(batch).loss for batch in data]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert ours.evaluate(data[0]) == pytest.approx(evaluated, rel=1e-5)


@pytest.mark.parametrize(
  "plan",
  [
    {"weights": "flow"},
    {"weights": "flow", "weight_cast": "device", "grad_cast": "device"},
    {"activations": "offload", "grad_cast": "device"},
    {"weight_cast": "device", "ring_slots": 1},
  ],
  ids=str,
)
def test_plans_do_not_change_a_bit(plan):
  def run(plan):
    with on_ranks(8, plan, model=ragged(), precision="bf16") as ours:
      for batch in data:
        ours.step(batch)
      return state_of(ours)

  data = [{"tokens": b["tokens"] % 251} for b in batches(4, rows=ROWS)]
  assert_same_bits(run(plan), run({}))


@pytest.mark.parametrize(
  "plan", [{"activations": "keep"}, {"device_buckets": 2}], ids=str
)
def test_other_programs_agree_within_rounding(plan):
  data = batches(10, rows=ROWS)
  with trainer(plan, micro_batch=ROWS) as one:
    expected = [one.step(batch).loss for batch in data]
  with on_ranks(8, plan) as ours:
    losses = [ours.step(batch).loss for batch in data]
  np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("num_devices", [2, 8])
def test_the_host_adds_up_the_micro_batches_of_all_ranks(num_devices):
  """As one device's host does: in another order, from other norms."""
  data = batches(10, rows=ROWS * 3)
  plan = {"accumulate": "host", "bucket_bytes": 1 << 16, "device_buckets": 2}
  with trainer(plan, micro_batch=ROWS, accumulation=3) as one:
    expected = [one.step(batch).loss for batch in data]
    norm = one.step(data[0]).grad_norm
  with on_ranks(num_devices, plan, accumulation=3) as ours:
    losses = [ours.step(batch).loss for batch in data]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert ours.step(data[0]).grad_norm == pytest.approx(norm, rel=1e-4)


def test_ragged_units_are_padded_and_train():
  plan = {"bucket_bytes": 1 << 16}
  data = [{"tokens": b["tokens"] % 251} for b in batches(10, rows=ROWS)]
  with trainer(plan, model=ragged(), micro_batch=ROWS) as one:
    expected = [one.step(batch).loss for batch in data]
  with on_ranks(8, plan, model=ragged()) as ours:
    units = [unit for bucket in ours.layout.buckets for unit in bucket.units]
    padded = [u for u in units if u.size > sum(s.size for s in u.slices)]
    assert len(padded) > 3
    losses = [ours.step(batch).loss for batch in data]
  np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_a_checkpoint_of_eight_resumes_on_any_number(tmp_path, num_devices):
  data = batches(3, rows=ROWS)
  with on_ranks(8, {"device_buckets": 1}, precision="fp16") as first:
    for batch in data:
      first.step(batch)
    first.save(tmp_path)
    expected = state_of(first)
  with on_ranks(num_devices, precision="fp16") as second:
    second.step(data[0])  # what it has seen before must not matter
    second.restore(tmp_path)
    assert_same_bits(state_of(second), expected)
    second.step(data[1])
    second.drain()


@pytest.mark.parametrize("explicit", [False, True])
def test_axes_of_either_type_give_the_same_bits(explicit):
  def run(mesh):
    with trainer(mesh=mesh, micro_batch=2) as ours:
      for batch in batches(3, rows=ROWS):
        ours.step(batch)
      return state_of(ours)

  ours = mesh_of(4, explicit=explicit)
  with jax.set_mesh(ours):  # as a script may do for programs of its own
    state = run(ours)
  assert_same_bits(state, run(mesh_of(4)))


def test_every_rank_drops_units_of_its_own():
  """Rows that are equal get different losses only by their dropout."""
  model = small_gpt(dropout=0.5)
  batch = {"tokens": np.repeat(batches(1, rows=1)[0]["tokens"], 8, axis=0)}
  with on_ranks(8, model=model, adamw=sojax.adamw(0.0)) as ours:
    last = ours._parts.compute._programs[-1]
    finish, seen = last.finish, []

    def watching(params, other, x, *rest):
      seen.append(np.asarray(x))
      return finish(params, other, x, *rest)

    last.finish = watching
    ours.step(batch)
    ours.drain()
    last.finish = finish
    counts = [v for k, v in state_of(ours).items() if "'count'" in k]
  (rows,) = seen
  assert len({row.tobytes() for row in rows}) == 8
  assert counts and all(int(count) > 0 for count in counts)


class Normalised(nnx.Module):
  """Has running statistics, as other state."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCAB_SIZE, 16, rngs=rngs)
    self.norm = nnx.BatchNorm(16, rngs=rngs)
    self.head = nnx.Linear(16, VOCAB_SIZE, rngs=rngs)

  def __call__(self, tokens_BT):
    return self.head(self.norm(self.embed(tokens_BT)))


def test_running_statistics_are_averaged_over_the_ranks():
  model = Normalised()
  (batch,) = batches(1, rows=ROWS)
  table = np.asarray(model.embed.embedding[...], np.float64)
  with on_ranks(4, model=model) as ours:
    ours.step(batch)
    (mean,) = [v for k, v in state_of(ours).items() if "mean" in k]
  expected = 0.01 * table[batch["tokens"][:, :-1]].mean((0, 1))
  np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-9)


class KeyChanging(nnx.Module):
  """Replaces its random key, which ranks cannot do together."""

  def __init__(self):
    self.embed = nnx.Embed(VOCAB_SIZE, VOCAB_SIZE, rngs=nnx.Rngs(0))
    self.key = nnx.Variable(jax.random.key(0))

  def __call__(self, tokens_BT):
    self.key.set_value(jax.random.split(self.key[...], 1)[0])
    return self.embed(tokens_BT)


def test_a_stage_that_replaces_a_random_key_is_refused():
  with on_ranks(4, model=KeyChanging()) as ours:
    with pytest.raises(sojax.StepError) as raised:
      ours.step(batches(1, rows=ROWS)[0])
    assert "use a stream that counts" in str(raised.value.__cause__)
    assert raised.value.intact


def test_wrong_batches_are_refused():
  with on_ranks(8) as ours:
    with pytest.raises(ValueError, match="data ranks = 8"):
      ours.step(batches(1, rows=4)[0])
    with pytest.raises(ValueError, match="data ranks = 8"):
      ours.evaluate(batches(1, rows=4)[0])


def test_a_skipped_step_changes_nothing_on_any_rank():
  data = batches(3, rows=ROWS)
  bad = dict(data[1], loss_mask=np.ones((ROWS, 24), np.float32))
  bad["loss_mask"][5, 3] = np.inf  # a row of one rank

  with on_ranks(8, {"device_buckets": 2}) as ours:
    ours.step(data[0])
    before = state_of(ours)
    assert ours.step(bad).skipped
    after = state_of(ours)
    assert after.pop("num_steps") == before.pop("num_steps") + 1
    assert_same_bits(after, before)


@pytest.mark.usefixtures("no_garbage")
def test_the_account_is_that_of_the_arrays():
  plan = {"bucket_bytes": 1 << 16, "device_buckets": 2}
  before = jax.live_arrays()
  with on_ranks(8, plan, model=ragged(), precision="bf16") as ours:
    new = [
      x for x in live_arrays_besides(before) if len(x.sharding.device_set) == 8
    ]  # a shard seen alone is an array as well
    host, device = ours.account.host, ours.account.device
    state = ours._state
    masters = [b.masters.array for b in state.host.values()]
    assert host["masters"] == sum(x.nbytes for x in masters)
    pinned = [x for x in new if x.sharding.memory_kind == "pinned_host"]
    assert host["ring"] == sum(x.nbytes for x in pinned)
    states = jax.tree.leaves(state.device)
    assert device["device_buckets"] == sum(x.nbytes for x in states) // 8
    weights = ours._parts.weights._parameters._units.values()
    on_all = sum(unit.nbytes for units in weights for unit in units)
    assert device["weights"] == on_all // 8
