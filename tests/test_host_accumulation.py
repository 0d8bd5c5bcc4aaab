"""Micro-batches that are added up on either side, against slow twins.

The twins take each micro-batch's gradients as they were recorded, add them up
in NumPy and update with the float32 twin of AdamW.
"""

import dataclasses

import numpy as np
import pytest

from sojax.cluster.mesh import Placement
from sojax.host.kernels import CHUNK_ELEMS
from sojax.plan.adamw import adam_scalars
from sojax.programs.stages import StagePrograms
from sojax.reference.accumulate import (
  accumulate_float32,
  chunk_sums_of_squares,
)
from sojax.reference.adamw import adamw_float32
from sojax.reference.loop import Loop
from tests.exactness import optax_adamw
from tests.test_one_stage import Plain
from tests.training import (
  assert_same_bits,
  batches,
  config,
  record,
  record_micro_batches,
  small_gpt,
  state_of,
  trainer,
)

KINDS = ("master", "mu", "nu")
HOST = {"accumulate": "host"}
SMALL_BUCKETS = {"bucket_bytes": 1 << 16}


def model(**changes):
  """A GPT whose table is cut by the smallest buckets, its last chunk short."""
  return small_gpt(**({"vocab_size": 2000} | changes))


def start(plan=HOST, *, of=model, accumulation=4, **changes):
  return trainer(plan, model=of(), accumulation=accumulation, **changes)


def take_steps(ours, num_steps=3):
  rows = 4 * ours.config.accumulation
  return [ours.step(batch) for batch in batches(num_steps, rows=rows)]


def add_up(micro_batches):
  """Returns the float32 sums of recorded gradients, by leaf name."""
  first, *others = micro_batches
  sums = {name: grad.astype(np.float32) for name, grad in first.items()}
  for grads in others:
    sums = {n: accumulate_float32(sums[n], grads[n]) for n in sums}
  return sums


def norm_of(sums, leaves):
  """Returns the float32 norm: of one float64 sum, chunk by chunk."""
  chunks = [chunk_sums_of_squares(sums[leaf.name]) for leaf in leaves]
  return np.sqrt(np.float32(np.sum(np.concatenate(chunks))))


def updated(before, grads, leaf, hyper, count, grad_scale):
  """Returns the twin's master, mu and nu of a leaf, by their names."""
  names = [f"{leaf.name} {kind}" for kind in KINDS]
  new = adamw_float32(
    *(before[name] for name in names),
    grads[leaf.name],
    adam_scalars(hyper, count),
    grad_scale,
  )
  return dict(zip(names, new, strict=True))


@pytest.mark.parametrize(
  ("accumulation", "precision", "changes"),
  [
    (1, "bf16", {}),
    (2, "bf16", {}),
    (3, "bf16", {}),
    (4, "bf16", {}),
    (4, "fp32", {}),
    (4, "fp16", {}),
    (4, "bf16", {"of": lambda: model(tie_head=False)}),
    (4, "fp32", {"of": Plain}),
    (4, "fp32", {"clip_norm": 0.3, "plan": HOST | SMALL_BUCKETS}),
  ],
)
def test_steps_have_the_bits_of_the_slow_twin(accumulation, precision, changes):
  changes = {"accumulation": accumulation, "precision": precision} | changes
  with start(**changes) as ours:
    seen = record_micro_batches(ours)
    state = state_of(ours)
    metrics = take_steps(ours)
    norms = [m.grad_norm for m in metrics]
    scales = [np.float32(m.loss_scale) for m in metrics]
    after = state_of(ours)
    leaves, groups = ours.layout.model.leaves, ours.layout.model.groups
    clip = np.float32(ours.config.clip_norm)
  for number, micro_batches in enumerate(seen):
    assert len(micro_batches) == accumulation
    sums = add_up(micro_batches)
    unscale = 1 / scales[number]
    norm = norm_of(sums, leaves) * unscale
    assert norms[number] == norm
    grad_scale = min(np.float32(1.0), clip / norm) * unscale
    for leaf in leaves:
      state |= updated(
        state, sums, leaf, groups[leaf.group], number, grad_scale
      )
  assert len(seen) == 3
  trained = {name: after[name] for name in state if name.endswith(KINDS)}
  assert_same_bits({name: state[name] for name in trained}, trained)


def outcome(plan, num_steps=3, **changes):
  with start(plan, **changes) as ours:
    metrics = take_steps(ours, num_steps)
    return {
      "loss": np.array([m.loss for m in metrics]),
      "grad_norm": np.array([m.grad_norm for m in metrics]),
      **state_of(ours),
    }


@pytest.fixture(scope="module")
def straight():
  return outcome(HOST | {"pool_threads": 2}, precision="bf16")


@pytest.mark.parametrize(
  "plan",
  [
    SMALL_BUCKETS,
    {"bucket_bytes": 100_000},
    {"pool_threads": 1},
    {"pool_threads": 3} | SMALL_BUCKETS,
    {"weights": "flow"},
    {"weights": "flow", "flow_window": 3} | SMALL_BUCKETS,
    {"grad_cast": "device"},
    {"weight_cast": "device"},
    {"ring_slots": 1} | SMALL_BUCKETS,
    {"activations": "offload"},
  ],
  ids=str,
)
def test_steps_have_the_same_bits_under_every_plan(straight, plan):
  """State and norm: cuts fall between chunks."""
  assert_same_bits(outcome(HOST | plan, precision="bf16"), straight)


def test_buckets_of_these_tests_cut_a_leaf_in_several_places():
  cuts = set()
  for size in (1 << 16, 100_000):
    with start(HOST | {"bucket_bytes": size}, precision="bf16") as ours:
      pieces = [s for b in ours.layout.buckets for s in b.slices if s.start]
    assert pieces
    cuts.add(tuple(piece.start for piece in pieces))
    assert all(piece.start % CHUNK_ELEMS == 0 for piece in pieces)
  assert len(cuts) == 2


def record_on_device(ours):
  """Records each micro-batch's gradients before the device adds them up.

  Another program computes them once more: they do not depend on what becomes
  of them.

  Returns:
    For each micro-batch, steps in a row, float32 gradients by leaf name.
  """
  placement, leaves = Placement.of(None), ours.layout.model.leaves
  seen: list[dict[str, np.ndarray]] = []
  last = len(ours._parts.compute._programs) - 1

  def recording(stage, programs):
    spec = programs.spec
    probe = StagePrograms(
      dataclasses.replace(spec, accumulate="device", reuses_dy=False), placement
    )

    def backward(name):
      def run(params, other, x, dy, tied, *rest):
        out = probe.add(params, other, x, dy, tied, (), None)
        if stage == last:
          seen.append({})
        for place, grad in zip(spec.trained, out.partial, strict=True):
          leaf = leaves[ours._setup.split.used[stage][place]]
          seen[-1][leaf.name] = np.array(grad).reshape(-1)
        return getattr(programs, name)(params, other, x, dy, tied, *rest)

      return run

    recorder = StagePrograms(spec, placement)
    recorder.add, recorder.finish = backward("add"), backward("finish")
    return recorder

  ours._parts.compute._programs = tuple(
    recording(*item) for item in enumerate(ours._parts.compute._programs)
  )
  return seen


@pytest.mark.parametrize(
  ("accumulation", "precision"), [(1, "bf16"), (4, "bf16"), (4, "fp32")]
)
def test_sums_on_the_device_have_the_bits_of_their_slow_twin(
  accumulation, precision
):
  changes = {"accumulation": accumulation, "precision": precision}
  with start({}, **changes) as ours:
    micro_batches, steps = record_on_device(ours), record(ours)
    state = state_of(ours)
    take_steps(ours)
    after = state_of(ours)
    model_ = ours.layout.model
  assert len(steps) == 3
  assert len(micro_batches) == 3 * accumulation
  for number, seen in enumerate(steps):
    first = number * accumulation
    sums = add_up(micro_batches[first : first + accumulation])
    for leaf in model_.leaves:
      wire = seen.grads[leaf.name]
      rounded = sums[leaf.name].astype(wire.dtype)
      assert rounded.tobytes() == wire.tobytes(), (number, leaf.name)
      state |= updated(
        state,
        {leaf.name: rounded},
        leaf,
        model_.groups[leaf.group],
        number,
        seen.grad_scale,
      )
    squares = [np.sum(g.astype(np.float64) ** 2) for g in seen.grads.values()]
    assert seen.norm == pytest.approx(np.sqrt(sum(squares)), rel=1e-5)
  trained = {name: after[name] for name in state if name.endswith(KINDS)}
  assert_same_bits({name: state[name] for name in trained}, trained)


@pytest.mark.parametrize("of", [model, Plain])
def test_in_float32_both_sides_give_the_same_bits(of):
  """Where nothing is clipped: the norms are those of other sums."""
  ours, theirs = (
    outcome({"accumulate": side}, of=of, clip_norm=None)
    for side in ("host", "device")
  )
  norms, others = ours.pop("grad_norm"), theirs.pop("grad_norm")
  np.testing.assert_allclose(norms, others, rtol=1e-5)
  assert_same_bits(ours, theirs)


@pytest.mark.parametrize("weights", ["stationary", "flow"])
def test_free_running_losses_match_plain_optax(weights):
  changes = {"accumulation": 4, "micro_batch": 2}
  theirs = Loop(small_gpt(), optax_adamw(), config(**changes))
  with start(HOST | {"weights": weights}, of=small_gpt, **changes) as ours:
    for batch in batches(30, rows=8):
      loss = float(theirs.step(batch))
      assert ours.step(batch).loss == pytest.approx(loss, rel=1e-5)


def test_the_norm_of_four_micro_batches_is_that_of_their_batch():
  (batch,) = batches(1, rows=16)
  norms = []
  for side, changes in (
    ("host", {"micro_batch": 4, "accumulation": 4}),
    ("host", {"micro_batch": 16, "accumulation": 1}),
    ("device", {"micro_batch": 16, "accumulation": 1}),
  ):
    with trainer({"accumulate": side}, **changes) as ours:
      norms.append(ours.step(batch).grad_norm)
  # float32 sums in another order: 384 tokens.
  assert norms[1:] == pytest.approx([norms[0]] * 2, rel=384 * 2.0**-24)


# Device buckets.


@pytest.mark.parametrize(
  ("accumulation", "precision"), [(1, "fp32"), (4, "fp32"), (4, "bf16")]
)
def test_a_leaf_cut_between_both_sides_is_added_up_on_both(
  accumulation, precision
):
  """The part on the host has the twin's bits; that on the device, where the
  compiler may fuse, is within a few roundings, as its update is."""
  plan = HOST | SMALL_BUCKETS | {"device_buckets": 2}
  changes = {"accumulation": accumulation, "precision": precision}
  with start(plan, **changes) as ours:
    seen, on_device = record_micro_batches(ours), record_on_device(ours)
    steps = record(ours)
    before = state_of(ours)
    norm = take_steps(ours, 1)[0].grad_norm
    after = state_of(ours)
    layout = ours.layout
  assert layout.on_both_sides
  scale = steps[0].grad_scale
  sums, device_sums = add_up(seen[0]), add_up(on_device)
  working = {"fp32": np.float32, "bf16": "bfloat16"}[precision]
  squares = 0.0
  for bucket in layout.buckets:
    for piece in bucket.slices:
      leaf = layout.model.leaves[piece.leaf]
      grads = sums
      if bucket.on_device:
        rounded = device_sums[leaf.name].astype(working).astype(np.float32)
        grads = {leaf.name: rounded}
      twin = updated(
        before, grads, leaf, layout.model.groups[bucket.group], 0, scale
      )
      part = slice(piece.start, piece.stop)
      squares += np.sum(grads[leaf.name][part].astype(np.float64) ** 2)
      for name, values in twin.items():
        ours_, theirs = after[name][part], values[part]
        if bucket.on_device:
          bound = 4 * 2.0**-24 * np.abs(theirs).max()
          assert np.all(np.abs(ours_ - theirs) <= bound), name
        else:
          assert ours_.tobytes() == theirs.tobytes(), name
  assert norm == pytest.approx(np.sqrt(squares), rel=1e-5)


def on_device(ours):
  buckets = [b for b in ours.layout.buckets if b.on_device]
  return {piece.leaf for bucket in buckets for piece in bucket.slices}


def test_cuts_do_not_change_the_bits_of_what_the_device_adds_up():
  """Both plans keep the same elements on the device: embed's."""
  plans = ({"device_buckets": 1}, SMALL_BUCKETS | {"device_buckets": 9})
  states, leaves = [], []
  for plan in plans:
    with start(HOST | plan, clip_norm=None) as ours:
      take_steps(ours)
      states.append(state_of(ours))
      leaves.append(on_device(ours))
      assert not ours.layout.on_both_sides
  assert leaves[0] == leaves[1] and len(leaves[0]) == 2
  assert_same_bits(*states)


def test_with_every_bucket_on_the_device_nothing_goes_to_the_host():
  plan = {"device_buckets": 6}
  with start(HOST | plan, clip_norm=None) as ours:
    others = [t for t in ours.graph.tasks if t.kind != "host_scalars"]
    assert {task.lane for task in others} == {"device"}
  ours, theirs = (
    outcome(plan | {"accumulate": side}, clip_norm=None)
    for side in ("host", "device")
  )
  norms, others = ours.pop("grad_norm"), theirs.pop("grad_norm")
  np.testing.assert_allclose(norms, others, rtol=1e-5)
  assert_same_bits(ours, theirs)
