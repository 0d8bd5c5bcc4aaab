"""What the tests of whole training runs share: a small model, its batches."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import sojax
from sojax.graph.graph import TaskKind
from sojax.host import arena, kernels, wire
from sojax.models.gpt import GPT, GPTConfig
from sojax.runtime import lanes

VOCAB_SIZE = 256
SEQ_LEN = 24
ROWS = 8
"""Rows of a micro-batch on all devices together."""


def live_arrays_besides(others: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns the arrays that live besides those, which the caller has kept."""
  known = {id(array) for array in others}
  return [array for array in jax.live_arrays() if id(array) not in known]


def small_gpt(**changes) -> GPT:
  """Builds a GPT of two blocks; a MiB of parameters."""
  config = {
    "vocab_size": VOCAB_SIZE,
    "num_layers": 2,
    "hidden_dim": 64,
    "num_heads": 2,
    "max_seq_len": 32,
  }
  return GPT(GPTConfig(**(config | changes)), rngs=nnx.Rngs(0))


def decayed(params):
  """Decays matrices only, as is usual."""
  return jax.tree.map(lambda x: x.ndim > 1, params)


def optimizer(**changes) -> sojax.AdamW:
  schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 3, 40)
  arguments = {"b2": 0.95, "weight_decay": 0.1, "mask": decayed} | changes
  return sojax.adamw(arguments.pop("learning_rate", schedule), **arguments)


def config(**changes) -> sojax.TrainConfig:
  return sojax.TrainConfig(**({"micro_batch": 4, "seq_len": SEQ_LEN} | changes))


def batches(count, *, rows=4, seed=0, seq_len=SEQ_LEN) -> list[dict[str, Any]]:
  """Makes batches of tokens whose next one can be learned."""
  rng = np.random.default_rng(seed)
  starts = rng.integers(0, VOCAB_SIZE, (count, rows, 1))
  steps = rng.integers(1, 4, (count, rows, 1))
  tokens = (starts + steps * np.arange(seq_len + 1)) % VOCAB_SIZE
  return [{"tokens": t} for t in tokens.astype(np.int32)]


def trainer(plan=None, *, model=None, adamw=None, mesh=None, **changes):
  return sojax.Trainer(
    model or small_gpt(),
    adamw or optimizer(),
    config(**changes),
    plan or {},
    mesh,
  )


def mesh_of(num_devices, *, explicit=False):
  """A mesh of `num_devices` data ranks, of Explicit or Auto axes."""
  devices = jax.devices()[:num_devices]
  if explicit:
    return jax.make_mesh((num_devices, 1), ("data", "seq"), devices=devices)
  return Mesh(np.array(devices).reshape(-1, 1), ("data", "seq"))


def on_ranks(num_devices, plan=None, **changes):
  """Returns a trainer whose global micro-batch has ROWS rows."""
  return trainer(
    plan,
    mesh=mesh_of(num_devices),
    micro_batch=ROWS // num_devices,
    **changes,
  )


def ragged():
  """A model of which many wire units do not divide into eight shards."""
  return small_gpt(vocab_size=251, num_layers=1, hidden_dim=66, num_heads=3)


def state_of(trainer) -> dict[str, np.ndarray]:
  """Returns every array and counter of the state, by name; waits."""
  trainer.drain()
  state = trainer._state
  arrays = {
    f"{leaf.name} {kind}": state.read(i, kind, 0, leaf.size)
    for i, leaf in enumerate(state.leaves)
    for kind in (("master", "mu", "nu") if leaf.trained else ("master",))
  }
  counters = {k: np.array(v) for k, v in state.scalars().items()}
  return arrays | counters | state.other_state()


def assert_same_bits(ours: Mapping[str, Any], theirs: Mapping[str, Any]):
  assert ours.keys() == theirs.keys()
  for name, array in ours.items():
    assert array.dtype == theirs[name].dtype, name
    same = array.tobytes() == theirs[name].tobytes()
    assert same, f"{name} differs"


STARTS = ((kernels._cpu_ops, "Pool"), (lanes.Worker, "__init__"))
"""What starts threads."""

TAKES = ((arena.Arena, "__init__"), (wire.WireBuffer, "__init__"))
"""What takes memory."""


@contextlib.contextmanager
def watching():
  """Yields a list of what is taken and started meanwhile."""
  taken = []
  with pytest.MonkeyPatch.context() as patch:
    for owner, name in STARTS + TAKES:
      original = getattr(owner, name)

      def noting(*args, original=original, what=(owner, name), **kwargs):
        taken.append(what)
        return original(*args, **kwargs)

      patch.setattr(owner, name, noting)
    yield taken


@dataclasses.dataclass
class Recorded:
  """What the host updates of one step were given."""

  grads: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  grad_scale: float = 0.0
  norm: float = 0.0
  scalars: tuple[Any, ...] = ()


def scatter(leaves, bucket, grads, into: dict[str, np.ndarray]) -> None:
  """Copies a bucket's wire units into flat arrays by leaf name."""
  for unit, shards in zip(bucket.units, grads, strict=True):
    flat, offset = np.concatenate(shards), 0
    for piece in unit.slices:
      leaf = leaves[piece.leaf]
      whole = into.setdefault(leaf.name, np.zeros(leaf.size, flat.dtype))
      whole[piece.start : piece.stop] = flat[offset : offset + piece.size]
      offset += piece.size


def record_micro_batches(trainer) -> list[list[dict[str, np.ndarray]]]:
  """Records, from now on, what reaches the host with every micro-batch.

  Returns:
    For each step and micro-batch the gradients by leaf name, as they crossed
    the wire.
  """
  steps: list[list[dict[str, np.ndarray]]] = []
  actions = trainer._executor._actions
  accumulate = actions[TaskKind.HOST_ACCUMULATE]
  leaves = trainer.layout.model.leaves

  def recording_accumulate(task, step):
    while len(steps) <= step.number:
      steps.append([{} for _ in range(trainer.config.accumulation)])
    bucket = trainer.layout.buckets[task.bucket]
    grads = step.micro_grads[task.bucket, task.micro]
    scatter(leaves, bucket, grads, steps[step.number][task.micro])
    return accumulate(task, step)

  actions[TaskKind.HOST_ACCUMULATE] = recording_accumulate
  return steps


def record(trainer) -> list[Recorded]:
  """Records, from now on, the gradients of each step by leaf name."""
  steps: list[Recorded] = []
  actions = trainer._executor._actions
  update = actions[TaskKind.HOST_UPDATE]
  leaves = trainer.layout.model.leaves

  def recording_update(task, step):
    while len(steps) <= step.number:
      steps.append(Recorded())
    seen = steps[step.number]
    seen.grad_scale = step.host_verdict.grad_scale
    seen.norm = step.host_verdict.norm
    seen.scalars = step.scalars
    bucket = trainer.layout.buckets[task.bucket]
    scatter(leaves, bucket, step.host_grads[task.bucket], seen.grads)
    return update(task, step)

  actions[TaskKind.HOST_UPDATE] = recording_update
  return steps
