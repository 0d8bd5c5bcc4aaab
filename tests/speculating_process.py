"""Runs of processes of their own that are killed, for tests of speculation.

python -m tests.speculating_process '{"directory": ..., "num_kills": ...}'
"""

import json
import os
import pathlib
import random
import signal
import sys

import jax
import numpy as np

from sojax.checkpoint import MANIFEST
from sojax.runtime.speculation import NormWatch
from tests.speculating import let_all_run_ahead, spiking_batches, trainer
from tests.training import state_of

NUM_STEPS = 30
SAVE_EVERY = 3
AHEAD = {"speculation": "record3", "speculate": "always"}
CHECKPOINTS = f"step_*[0-9]/{MANIFEST}"
SPIKES, INFINITE = (8, 19), (13, 22)


def no_objection(*args) -> None:
  """Lets updates run ahead of any norm."""
  del args


class Child:
  """A training run in a process of its own, which can be killed.

  It tells of each task that it issues, and of each file it writes, by a byte
  on a pipe.
  """

  def __init__(self, cache, directory, plan, clip_norm, out):
    self._pipe, tells = os.pipe()
    self.pid = os.fork()
    if self.pid:
      os.close(tells)
      return
    try:
      os.close(self._pipe)
      train(
        cache, directory, plan, clip_norm, out, lambda: os.write(tells, b".")
      )
      os._exit(0)
    except BaseException as error:
      print(repr(error), file=sys.stderr)
      os._exit(1)

  def kill_after(self, num_bytes) -> bool:
    """Kills it once it has told so much; returns whether it still ran."""
    while num_bytes > 0:
      told = os.read(self._pipe, num_bytes)
      if not told:
        break
      num_bytes -= len(told)
    else:
      os.kill(self.pid, signal.SIGKILL)
    return self._ended() == signal.SIGKILL

  def finish(self) -> None:
    """Waits until it has done everything."""
    while os.read(self._pipe, 1 << 16):
      pass
    self._ended()

  def _ended(self) -> int:
    os.close(self._pipe)
    _, status = os.waitpid(self.pid, 0)
    if status not in (0, signal.SIGKILL):
      raise RuntimeError(f"a run has failed: status {status}")
    return status


def train(cache, directory, plan, clip_norm, out, tell):
  """Trains, from the newest checkpoint on if there is one."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  data = spiking_batches(NUM_STEPS, spikes=SPIKES, infinite=INFINITE)
  NormWatch.objection = no_objection
  with trainer(plan, precision="bf16", clip_norm=clip_norm) as ours:
    let_all_run_ahead(ours)
    actions = ours._executor._actions
    for kind, action in list(actions.items()):

      def telling(task, step, action=action):
        tell()
        return action(task, step)

      actions[kind] = telling
    if any(directory.glob(CHECKPOINTS)):
      ours.restore(directory)
    fsync = os.fsync

    def telling_fsync(file):
      tell()
      fsync(file)

    os.fsync = telling_fsync
    norms, clipped = [], []
    while ours.num_steps < NUM_STEPS:
      metrics = ours.step(data[ours.num_steps])
      norms.append(metrics.grad_norm)
      clipped.append(metrics.clipped)
      if ours.num_steps % SAVE_EVERY == 0:
        ours.save(directory, keep=2)
        tell()
    np.savez(out, norms=norms, clipped=clipped)
    np.savez(out.with_suffix(".state.npz"), **state_of(ours))


def kill(*, directory, num_kills):
  """Kills runs until there were so many kills; compares what they end with."""
  root = pathlib.Path(directory)
  rng = random.Random(0)

  def whole(name, plan, clip_norm):
    out = root / f"{name}.npz"
    Child(root / "cache", root / name, plan, clip_norm, out).finish()
    return np.load(out), read_state(out)

  norms = whole("free", {"speculation": "wait"}, None)[0]["norms"]
  clip_norm = float(np.quantile(norms[np.isfinite(norms)], 0.75))
  figures, expected = whole("waiting", {"speculation": "wait"}, clip_norm)
  assert whole("ahead", AHEAD, clip_norm)[1] == expected
  kills, runs, resumed = 0, 0, 0
  while kills < num_kills:
    name = f"run_{runs}"
    out = root / f"{name}.npz"
    killed = True
    while killed:
      resumed += any((root / name).glob(CHECKPOINTS))
      child = Child(root / "cache", root / name, AHEAD, clip_norm, out)
      killed = child.kill_after(rng.randrange(1, 700))
      kills += killed
    assert read_state(out) == expected
    runs += 1
  clipped = float(figures["clipped"].mean())
  told = {"kills": kills, "runs": runs, "resumed": resumed, "clipped": clipped}
  print(json.dumps(told))


def read_state(out):
  """Returns the bytes of each array of a state that was written."""
  with np.load(out.with_suffix(".state.npz")) as arrays:
    return {name: arrays[name].tobytes() for name in arrays}


if __name__ == "__main__":
  kill(**json.loads(sys.argv[1]))
