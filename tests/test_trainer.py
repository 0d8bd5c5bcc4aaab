"""What the Trainer promises beside exactness: switches, groups, metrics."""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sojax
from tests.training import (
  SEQ_LEN,
  VOCAB_SIZE,
  assert_same_bits,
  batches,
  config,
  optimizer,
  record,
  small_gpt,
  state_of,
  trainer,
)


def test_an_explicit_mesh_of_one_trains():
  mesh = jax.make_mesh((1, 1), ("data", "seq"))
  ours = sojax.Trainer(small_gpt(), optimizer(), config(), mesh=mesh)
  plain = trainer()
  for batch in batches(2):
    ours.step(batch)
    plain.step(batch)
  assert_same_bits(state_of(ours), state_of(plain))


MIX = ("stationary", "stationary", "flow_once")  # of embed, block and head

SWITCHES = {
  "weights": ["stationary", "flow", "flow_once", MIX],
  "device_buckets": [0, 2],
  "grad_cast": ["host", "device", "host_separate"],
  "weight_cast": ["host", "device", "host_separate"],
  "activations": ["recompute", "keep", "offload"],
  "accumulate": ["device", "host"],
  "gradients_out": ["dma", "callback", "io_callback"],
  "speculation": ["wait", "record3", "record2", "pingpong"],
  "master": ["fp32", "split"],
  "park": ["host", "device"],
}


def is_allowed(values):
  plan = dict(zip(SWITCHES, values, strict=True))
  try:
    sojax.Plan(**plan)
  except ValueError:
    return False
  return True


COMBINATIONS = [*filter(is_allowed, itertools.product(*SWITCHES.values()))]


def without_the_last_three(combinations):
  """Returns one combination for each of the others, the last three in turn."""
  groups = {}
  for values in combinations:
    groups.setdefault(values[:-3], []).append(values)
  return [group[i % len(group)] for i, group in enumerate(groups.values())]


def pairs(values):
  """Returns the pairs of switches' values that a combination holds."""
  return set(itertools.combinations(enumerate(values), 2))


def covering(combinations):
  """Returns a few of the combinations that hold every pair of them all."""
  missing = set().union(*map(pairs, combinations))
  chosen = []
  while missing:
    best = max(combinations, key=lambda values: len(pairs(values) & missing))
    missing -= pairs(best)
    chosen.append(best)
  return chosen


@pytest.mark.parametrize("values", covering(COMBINATIONS), ids=str)
def test_every_pair_of_switches_runs(values):
  check_that_it_trains(values)


@pytest.mark.slow
@pytest.mark.parametrize(
  "values",
  without_the_last_three(
    values
    for values in COMBINATIONS
    if values[0] in ("stationary", "flow") and "io_callback" not in values
  ),
  ids=str,
)
def test_every_combination_of_switches_runs(values):
  check_that_it_trains(values)


def check_that_it_trains(values):
  plan = dict(zip(SWITCHES, values, strict=True)) | {"bucket_bytes": 1 << 16}
  plan["speculate"] = "always"
  model = small_gpt(num_layers=1, hidden_dim=32, num_heads=1)
  losses = []
  with trainer(plan, model=model, precision="bf16", accumulation=2) as ours:
    for batch in batches(2, rows=8):
      losses.append(ours.step(batch).loss)
    assert ours.count == 2
  assert losses[1] < losses[0] + 0.1


def test_a_whole_model_in_one_bucket_per_stage_trains():
  with trainer({"bucket_bytes": 1 << 30}) as ours:
    losses = [ours.step(batch).loss for batch in batches(30)]
  assert np.mean(losses[-5:]) < losses[0] - 0.8


def test_a_batch_may_be_overwritten_after_step_returns():
  with trainer() as ours, trainer() as theirs:
    for batch in batches(3):
      theirs.step(batch)
      ours.step(batch)
      batch["tokens"][:] = 0
    assert_same_bits(state_of(ours), state_of(theirs))


def test_the_global_norm_of_micro_batches_is_that_of_their_batch():
  (batch,) = batches(1, rows=16)
  whole = trainer(micro_batch=16).step(batch).grad_norm
  in_four = trainer(micro_batch=4, accumulation=4).step(batch).grad_norm
  # float32 sums in another order: 384 tokens.
  assert in_four == pytest.approx(whole, rel=384 * 2.0**-24)


def test_masked_tokens_do_not_count():
  rng = np.random.default_rng(0)
  (batch,) = batches(1, rows=8)
  mask = rng.random((8, SEQ_LEN)) < 0.3
  mask[4:] = False
  kept = {"tokens": batch["tokens"][:4], "loss_mask": mask[:4]}
  changed = batch["tokens"].copy()
  changed[4:] = 7
  with trainer(accumulation=2) as ours, trainer() as theirs:
    masked = {"tokens": changed, "loss_mask": mask}
    assert ours.evaluate(masked) == pytest.approx(theirs.evaluate(kept))
    ours_, theirs_ = ours.step(masked), theirs.step(kept)
    assert ours_.loss == pytest.approx(theirs_.loss, rel=1e-6)
    assert ours_.grad_norm == pytest.approx(theirs_.grad_norm, rel=1e-5)


def test_evaluate_is_the_loss_of_the_model_itself():
  with trainer() as ours:
    for batch in batches(3):
      ours.step(batch)
    (batch,) = batches(1, rows=8, seed=1)
    loss = ours.evaluate(batch)
    model = ours.sync_model()
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    plain = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["tokens"][:, 1:]
    )
    assert loss == pytest.approx(float(plain.mean()), rel=1e-5)
    before = state_of(ours)
    ours.evaluate(batch)
    assert_same_bits(state_of(ours), before)


def test_sync_model_writes_the_masters_back():
  model = small_gpt()
  with trainer(model=model) as ours:
    for batch in batches(3):
      ours.step(batch)
    assert ours.sync_model() is model
    state = state_of(ours)
  for stage in model.stages():
    for path, param in nnx.to_flat_state(nnx.state(stage.module, nnx.Param)):
      name = ".".join([stage.name, *map(str, path)])
      if f"{name} master" in state:  # the head's table is the embedding's
        value = np.asarray(param[...]).reshape(-1)
        assert value.tobytes() == state[f"{name} master"].tobytes()


def test_the_model_itself_is_left_alone_by_training():
  model = small_gpt()
  before = jax.tree.map(np.array, nnx.state(model, nnx.Param))
  with trainer(model=model) as ours:
    for batch in batches(2):
      ours.step(batch)
    ours.drain()
  after = nnx.state(model, nnx.Param)
  jax.tree.map(np.testing.assert_array_equal, before, after)


# Groups of hyper-parameters.


def test_each_leaf_follows_its_own_decay_and_its_group():
  """Replays the recorded gradients through optax, leaf by leaf."""

  def labels(params):
    return jax.tree.map_with_path(
      lambda path, _: "table" if "embed" in str(path) else "rest", params
    )

  groups = {
    "table": sojax.adamw(1e-3, weight_decay=0.0),
    "rest": sojax.adamw(
      2e-3,
      b2=0.9,
      weight_decay=0.3,
      mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    ),
  }
  for plan in ({}, {"bucket_bytes": 1 << 16}):
    ours = trainer(plan, adamw=sojax.partition(groups, labels), clip_norm=None)
    steps = record(ours)
    before = state_of(ours)
    for batch in batches(3):
      ours.step(batch)
    after = state_of(ours)
    leaves = ours.layout.model.leaves
    assert len({leaf.group for leaf in leaves}) == 3
    for leaf in leaves:
      in_table = leaf.name.startswith("embed")
      hyper = groups["table" if in_table else "rest"]
      decay = hyper.weight_decay if len(leaf.shape) > 1 else 0.0
      adam = optax.adamw(hyper.learning_rate, b2=hyper.b2, weight_decay=decay)
      p = jnp.array(before[f"{leaf.name} master"])
      state = adam.init(p)
      for step in steps:
        grad = jnp.array(step.grads[leaf.name])
        updates, state = adam.update(grad, state, p)
        p = p + updates
      # The update's first steps are +-lr: 1e-5 of lr, and p's rounding.
      bound = 3 * 1e-5 * hyper.learning_rate + 4 * np.spacing(np.abs(p))
      error = np.abs(after[f"{leaf.name} master"] - p)
      assert np.all(error <= bound), leaf.name


def test_host_and_device_updates_agree():
  """The same formula; XLA may fuse where the kernel does not, so not bits."""
  with trainer({"bucket_bytes": 1 << 16}) as host:
    num_buckets = len(host.layout.buckets)
    device = trainer({"bucket_bytes": 1 << 16, "device_buckets": num_buckets})
    assert not device._state.host
    for batch in batches(5):
      host.step(batch)
      device.step(batch)
    ours, theirs = state_of(device), state_of(host)
  for name, array in ours.items():
    if name.endswith("master"):
      bound = 5 * 1e-5 * 3e-3 + 1e-6 * np.abs(array)
      assert np.all(np.abs(array - theirs[name]) <= bound), name


def test_a_schedule_reaches_host_and_device_buckets_in_the_same_step():
  steps = [0.0, 0.0, 1e-3, 0.0]
  adamw = sojax.adamw(lambda count: jnp.array(steps)[count], weight_decay=0.0)
  with trainer({"device_buckets": 2}, adamw=adamw) as ours:
    history = [state_of(ours)]
    for batch in batches(4):
      ours.step(batch)
      history.append(state_of(ours))
  masters = [name for name in history[0] if name.endswith("master")]
  for number, lr in enumerate(steps):
    for name in masters:
      before, after = history[number][name], history[number + 1][name]
      assert (before.tobytes() != after.tobytes()) == bool(lr), name


class Experts(nnx.Module):
  """Sends every token to one of two experts, always the first one."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.embed = nnx.Embed(VOCAB_SIZE, 32, rngs=rngs)
    self.used = nnx.Linear(32, 32, rngs=rngs)
    self.unused = nnx.Linear(32, 32, rngs=rngs)
    self.head = nnx.Linear(32, VOCAB_SIZE, rngs=rngs)

  def __call__(self, tokens_BT):
    return self.head(self.used(self.embed(tokens_BT)))


@pytest.mark.parametrize("gradients_out", ["dma", "callback"])
@pytest.mark.parametrize("accumulate", ["device", "host"])
def test_a_layer_without_a_gradient_only_decays(gradients_out, accumulate):
  """Oracle: decay alone, in float64; the rest of its bucket is stepped."""
  plan = {"gradients_out": gradients_out, "accumulate": accumulate}
  adamw = sojax.adamw(1e-2, weight_decay=0.1)
  with trainer(plan, model=Experts(), adamw=adamw, accumulation=2) as ours:
    (bucket,) = ours.layout.buckets
    before = state_of(ours)
    for batch in batches(3, rows=8):
      ours.step(batch)
    after = state_of(ours)
  for name in (leaf.name for leaf in ours.layout.model.leaves):
    master = after[f"{name} master"]
    if "unused" in name:
      decayed = before[f"{name} master"] * (1 - 1e-3) ** 3
      np.testing.assert_allclose(master, decayed, rtol=1e-6)
      assert not after[f"{name} mu"].any() and not after[f"{name} nu"].any()
    else:
      assert after[f"{name} mu"].any()
      assert not np.array_equal(master, before[f"{name} master"])


def test_only_trainable_parameters_change():
  for weights in ("stationary", "flow"):
    model = small_gpt()
    ours = sojax.Trainer(
      model,
      optimizer(),
      config(precision="bf16"),
      {"weights": weights},
      trainable=nnx.PathContains("mlp"),
    )
    before = state_of(ours)
    for batch in batches(3):
      ours.step(batch)
    after = state_of(ours)
    masters = [name for name in before if name.endswith("master")]
    changed = {n for n in masters if before[n].tobytes() != after[n].tobytes()}
    assert changed == {n for n in masters if ".mlp." in n}
    assert not any(n.endswith("mu") and ".mlp." not in n for n in after)
    ours.close()


def test_dropout_makes_steps_differ_and_evaluation_not():
  (batch,) = batches(1)
  frozen = sojax.adamw(0.0, weight_decay=0.0)
  with trainer(model=small_gpt(dropout=0.5), adamw=frozen) as ours:
    assert ours.evaluate(batch) == ours.evaluate(batch)
    losses = [ours.step(batch).loss for _ in range(3)]
    assert len(set(losses)) == 3


def test_the_timeline_accounts_for_the_steps():
  with trainer({"bucket_bytes": 1 << 16}) as ours:
    metrics = [ours.step(batch) for batch in batches(3)]
    ours.drain()
    timeline = ours.timeline()
  assert len(timeline.spans) == 3 * len(ours.graph.tasks)
  for metric in metrics:
    host_s = timeline.steps(metric.step, metric.step).busy_s("host")
    assert 0 <= metric.exposed_host_s <= host_s


def test_there_is_a_thread_on_each_core_that_the_plan_names():
  core = min(os.sched_getaffinity(0))
  with trainer({"pool_cores": (core,)}) as ours:
    pool = ours._parts._pool
    assert (pool.num_threads, pool.cores) == (1, (core,))
    ours.step(batches(1)[0])


def test_close_may_be_called_again_and_ends_training():
  ours = trainer()
  ours.step(batches(1)[0])
  ours.close()
  ours.close()
  assert ours.count == 1
  with pytest.raises(RuntimeError, match="the trainer is closed"):
    ours.step(batches(1)[0])


@pytest.mark.parametrize("window", [2, 3, 4, 5, 99])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_flow_window_trains_to_the_same_bits(window, accumulation):
  """A window may hold two uses of one stage."""
  data = batches(2, rows=4 * accumulation)
  states = []
  for size in (2, window):
    plan = {"weights": "flow", "flow_window": size}
    with trainer(plan, accumulation=accumulation) as ours:
      for batch in data:
        ours.step(batch)
      states.append(state_of(ours))
  assert_same_bits(*states)


def test_sync_model_writes_other_state_and_keeps_dtypes():
  model = small_gpt(dropout=0.2)
  norm = model.head.norm.scale
  norm.set_value(norm.get_value().astype(jnp.bfloat16))
  with trainer(model=model) as ours:
    for batch in batches(2):
      ours.step(batch)
    ours.sync_model()
    others = ours._state.other_state()
  counts = [
    np.asarray(v[...])
    for _, v in nnx.iter_graph(model)
    if isinstance(v, nnx.RngCount)
  ]
  assert norm.get_value().dtype == jnp.bfloat16
  wanted = [value for name, value in others.items() if "'count'" in name]
  assert sorted(counts) == sorted(wanted)
  assert min(counts) == 2
