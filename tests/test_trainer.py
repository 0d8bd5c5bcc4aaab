"""What the Trainer promises beside exactness: errors, skips, failures."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sojax
from sojax.graph.graph import TaskKind
from sojax.models.gpt import GPT, GPTConfig, abstract_gpt
from sojax.models.stage import Stage
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

TOKENS = batches(1)[0]["tokens"]


def with_token(value):
  tokens = TOKENS.copy()
  tokens[1, 3] = value
  return tokens


@pytest.mark.parametrize(
  ("batch", "message"),
  [
    ({}, "it must have 'tokens'"),
    ({"tokens": TOKENS, "labels": TOKENS}, r"keys \['labels', 'tokens'\]"),
    ({"tokens": TOKENS.tolist()}, "tokens is a list; it must be a NumPy"),
    ({"tokens": jnp.asarray(TOKENS)}, "it must be a NumPy array"),
    ({"tokens": TOKENS.astype(np.int64)}, "tokens is int64; it must be int32"),
    ({"tokens": TOKENS[:, :-1]}, r"shape \(4, 24\); it must be \[rows"),
    ({"tokens": TOKENS[:3]}, "tokens has 3 rows"),
    ({"tokens": TOKENS[0]}, r"shape \(25,\)"),
    ({"tokens": with_token(-1)}, r"token -1 is out of range.*\[0, 256\)"),
    ({"tokens": with_token(256)}, r"token 256 is out of range.*\[0, 256\)"),
    (
      {"tokens": TOKENS, "loss_mask": np.ones((4, SEQ_LEN + 1), bool)},
      r"loss_mask has shape \(4, 25\)",
    ),
    (
      {"tokens": TOKENS, "loss_mask": np.ones((4, SEQ_LEN))},
      "loss_mask is float64",
    ),
    (
      {"tokens": TOKENS, "loss_mask": np.zeros((4, SEQ_LEN), np.float32)},
      "0 everywhere",
    ),
    (
      {"tokens": TOKENS, "loss_mask": -np.ones((4, SEQ_LEN), np.float32)},
      "must not be negative",
    ),
  ],
)
def test_a_wrong_batch_is_refused_and_changes_nothing(batch, message):
  with trainer() as ours:
    before = state_of(ours)
    with pytest.raises(ValueError, match=message):
      ours.step(batch)
    with pytest.raises(ValueError, match=message):
      ours.evaluate(batch)
    assert_same_bits(state_of(ours), before)
    assert ours.num_steps == 0


class NoStages(nnx.Module):
  """A model without stages()."""


class Repeats(nnx.Module):
  """A model whose stages have the same name."""

  def __init__(self, names=("a", "a")):
    self.names = names
    self.parts = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in names])

  def stages(self):
    return [
      Stage(name=name, module=part)
      for name, part in zip(self.names, self.parts, strict=True)
    ]


class Pair(nnx.Module):
  """Returns two arrays."""

  def __call__(self, x):
    return x, x


class Grows(nnx.Module):
  """Makes a Variable while it runs."""

  def __call__(self, x):
    self.seen = nnx.Variable(x)
    return x


class Double(nnx.Module):
  """Makes the activation twice as wide."""

  def __call__(self, x):
    return jnp.concatenate([x, x], axis=-1)


class Last(nnx.Module):
  """Averages over the width, against the targets."""

  def __init__(self, loss):
    self.kind = loss
    self.scale = nnx.Param(jnp.ones(()))

  def loss(self, x, targets, mask):
    wrong = mask * (self.scale[...] * x.mean(-1) - targets / 256) ** 2
    return wrong.sum() if self.kind == "scalar" else wrong


class Chain(nnx.Module):
  """An embedding, some middle stage, and a loss; a scalar Param in it."""

  def __init__(self, middle, *, last=True, loss="scalar"):
    self.embed = nnx.Embed(VOCAB_SIZE, 8, rngs=nnx.Rngs(0))
    self.middle = globals()[middle]()
    self.last = Last(loss) if last else Double()

  def stages(self):
    return [
      Stage(name=name, module=getattr(self, name))
      for name in ("embed", "middle", "last")
    ]


class Outside(Chain):
  """Has a Param that no stage holds."""

  def __init__(self):
    super().__init__("Double")
    self.extra = nnx.Param(jnp.ones(3))


class Shared(Chain):
  """Two stages draw from one stream of random keys."""

  def __init__(self):
    super().__init__("Double")
    self.middle.rngs = self.embed.rngs = nnx.Rngs(0).dropout


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_stages_without_parameters_and_with_scalars_train(precision, weights):
  """A middle stage that changes the activation's shape, too."""
  adamw = sojax.adamw(1e-2, weight_decay=0.0)
  ours = sojax.Trainer(
    Chain("Double"), adamw, config(precision=precision), {"weights": weights}
  )
  with ours:
    losses = [ours.step(batch).loss for batch in batches(20)]
  assert np.mean(losses[-3:]) < np.mean(losses[:3])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"model": NoStages()}, "NoStages has no stages()"),
    ({"model": Repeats()}, "stage name 'a' repeats"),
    ({"model": Repeats(("a",))}, "stages.. gave 1 stage; at least 2"),
    ({"model": abstract_gpt(small_gpt().config)}, "embed.* is abstract"),
    ({"model": Outside()}, "extra of the model is in none of its stages"),
    ({"model": Shared()}, "one Variable in two stages.*rngs.fork"),
    ({"model": Chain("Pair")}, "'middle' returns .*one floating-point array"),
    ({"model": Chain("Grows")}, "'middle' changes which other state"),
    ({"model": Chain("Double", last=False)}, "without loss"),
    ({"model": Chain("Double", loss="vector")}, r"shape \(4, 24\); it must be"),
    ({"plan": None}, "plan is a NoneType"),
    ({"plan": {"pool_threads": 5000}}, "num_threads=5000"),
    ({"config": {"micro_batch": 4}}, "config is a dict; use TrainConfig"),
    (
      {"optimizer": sojax.adamw(lambda count: np.ones(2))},
      r"learning_rate has shape \(2,\) at step count 0",
    ),
    ({"optimizer": optax.adamw(1e-3)}, "use sojax.adamw"),
    ({"optimizer": sojax.adamw(1e-3, mask={"x": True})}, "mask does not fit"),
    ({"optimizer": sojax.adamw(1e-3, mask=3.0)}, "mask holds 3.0"),
    (
      {"optimizer": sojax.partition({"a": sojax.adamw(1e-3)}, "b")},
      "label 'b' has no transform",
    ),
    ({"trainable": nnx.PathContains("nothing")}, "selects no parameter"),
    ({"plan": {"device_buckets": 99}}, "device_buckets=99 exceeds"),
    (
      {"plan": {"activations": ("keep", "keep", "offload")}},
      "activations names 3 stages, but the model has 4; name one for each",
    ),
    ({"plan": {"fast": True}}, "unknown plan switch 'fast'"),
    ({"config": config(seq_len=33)}, "33 tokens is longer than max_seq_len=32"),
    (
      {"mesh": jax.make_mesh((2, 1), ("data", "seq"))},
      "mesh of 2 devices is not there yet",
    ),
    ({"mesh": jax.make_mesh((1,), ("data",))}, "mesh axes"),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_argument_is_refused(arguments, message):
  good = {
    "model": small_gpt(),
    "optimizer": optimizer(),
    "config": config(),
    "plan": "auto",
  }
  with pytest.raises(ValueError, match=message):
    sojax.Trainer(**(good | arguments))


def test_an_explicit_mesh_of_one_trains():
  mesh = jax.make_mesh((1, 1), ("data", "seq"))
  ours = sojax.Trainer(small_gpt(), optimizer(), config(), mesh=mesh)
  plain = trainer()
  for batch in batches(2):
    ours.step(batch)
    plain.step(batch)
  assert_same_bits(state_of(ours), state_of(plain))


SWITCHES = {
  "weights": ["stationary", "flow"],
  "device_buckets": [0, 2],
  "grad_cast": ["host", "device"],
  "weight_cast": ["host", "device"],
  "activations": ["recompute", "keep", "offload"],
}


@pytest.mark.parametrize(
  "values",
  [
    values
    for values in itertools.product(*SWITCHES.values())
    if not (values[0] == "flow" and values[1])
  ],
  ids=str,
)
def test_every_combination_of_switches_runs(values):
  plan = dict(zip(SWITCHES, values, strict=True)) | {"bucket_bytes": 1 << 16}
  losses = []
  with trainer(plan, precision="bf16", accumulation=2) as ours:
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


# Steps that are skipped.


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


def test_dropout_makes_steps_differ_and_evaluation_not():
  (batch,) = batches(1)
  frozen = sojax.adamw(0.0, weight_decay=0.0)
  with trainer(model=small_gpt(dropout=0.5), adamw=frozen) as ours:
    assert ours.evaluate(batch) == ours.evaluate(batch)
    losses = [ours.step(batch).loss for _ in range(3)]
    assert len(set(losses)) == 3


# Failures.


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


def test_the_timeline_accounts_for_the_steps():
  with trainer({"bucket_bytes": 1 << 16}) as ours:
    metrics = [ours.step(batch) for batch in batches(3)]
    ours.drain()
    timeline = ours.timeline()
  assert len(timeline.spans) == 3 * len(ours.graph.tasks)
  for metric in metrics:
    host_s = timeline.steps(metric.step, metric.step).busy_s("host")
    assert 0 <= metric.exposed_host_s <= host_s


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


def test_a_failure_while_weights_are_unpacked_leaves_none_stale(monkeypatch):
  data = batches(3)
  with trainer() as ours, trainer() as theirs:
    ours.step(data[0])
    ours.drain()
    unpacker = ours._weights._unpacker
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
