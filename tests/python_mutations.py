"""Breaks what runs ahead, the simulator and the paced device; tests must fail.

    python -m tests.python_mutations            # all, about ten minutes
    python -m tests.python_mutations NAME...    # some
    python -m tests.python_mutations --list

Each mutation is a line of sojax/ changed in a copy. What no test notices is an
error.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from tests import simulator_faults

_ROOT = pathlib.Path(__file__).parents[1]
_MODEL = ("tests/test_speculation_model.py",)
_RUNS = (
  "tests/test_speculation.py",
  "-k",
  "taking_every and record3 and (plain or flow or no-escapes)",
)
_WITHIN_A_STEP = ("tests/test_speculation.py", "-k", "watch or within_the_step")
_FAILURES = (
  "tests/test_speculation_failures.py",
  "-k",
  "while_updates and (validate or infinite or spike) and dma",
)
_INTERRUPTS = ("tests/test_speculation_interrupts.py", "-k", "handling")
_ADAPTIVE = ("tests/test_adaptive.py",)
_SCHEDULE = ("tests/test_schedule_speculation.py",)
_PACED = ("tests/test_paced.py",)


@dataclasses.dataclass(frozen=True)
class Mutation:
  """One fault and the tests that have to notice it.

  Attributes:
    name: what to call it.
    file: of sojax/.
    old: what stands there, once.
    new: what stands there instead.
    tests: arguments of pytest.
  """

  name: str
  file: str
  old: str
  new: str
  tests: tuple[str, ...] = _RUNS


MUTATIONS = [
  # Settling.
  Mutation(
    "no-resend-after-a-skip",
    "runtime/updates.py",
    "      bucket.masters.round_to("
    "self._buffers(bucket.bucket, step), self._pool)\n"
    "      return Outcome.UNDONE",
    "      return Outcome.UNDONE",
  ),
  Mutation(
    "no-resend-after-a-redo",
    "runtime/updates.py",
    "      buffers = self._buffers(bucket.bucket, step)\n      bucket.redo(",
    "      buffers = [\n"
    "        [np.empty_like(shard) for shard in unit]\n"
    "        for unit in self._buffers(bucket.bucket, step)\n"
    "      ]\n"
    "      bucket.redo(",
  ),
  Mutation(
    "no-resend-of-what-was-left-out",
    "runtime/updates.py",
    "    if not bucket.commit(self._pool):\n",
    "    if not bucket.commit(self._pool) and False:\n",
  ),
  Mutation(
    "clipped-steps-are-committed",
    "runtime/updates.py",
    "if verdict.grad_scale != self._unclipped(step):",
    "if verdict.grad_scale > self._unclipped(step):",
  ),
  Mutation(
    "updates-that-come-late-are-dropped",
    "runtime/updates.py",
    "        self._update(index, step, verdict)\n      return Outcome.LATE",
    "        pass\n      return Outcome.LATE",
    ("tests/test_speculation_runs.py",),
  ),
  Mutation(
    "what-was-left-out-stays-so",
    "host/speculation.py",
    "    pool.submit(Finish(self._segments_taken(), self._record)).wait()\n",
    "    self._record.taken = None\n",
    _MODEL,
  ),
  Mutation(
    "redo-writes-no-weights",
    "host/speculation.py",
    "    segments = self.segments(self._pending().grads, weights_out)\n",
    "    segments = self._segments_taken()\n",
    _MODEL,
  ),
  Mutation(
    "copies-leave-out-nu",
    "host/speculation.py",
    "    pool.submit(Widen([*copies])).wait()\n",
    "    pool.submit(Widen([*copies][:2])).wait()\n",
    _MODEL,
  ),
  Mutation(
    "copies-are-redone-from-the-step",
    "host/speculation.py",
    "    self._undo(pool)\n    taken = self._pending()\n    self.step(",
    "    taken = self._pending()\n    self.step(",
    _MODEL,
  ),
  # What a step is taken with.
  Mutation(
    "the-learning-rate-of-the-next-step",
    "runtime/validation.py",
    "    step.scalars = self._scalars_at(self._state.count)\n",
    "    step.scalars = self._scalars_at(self._state.count + 1)\n",
    ("tests/test_trainer_exact.py",),
  ),
  Mutation(
    "unclipped-ignores-the-loss-scale",
    "runtime/validation.py",
    "    return float(np.float32(1.0) / np.float32(_loss_scale(step)))\n",
    "    return 1.0\n",
    ("tests/test_speculation.py", "-k", "fp16"),
  ),
  Mutation(
    "the-norm-of-the-last-micro-batch",
    "host/sums.py",
    "    kernel = pool.widen if first else pool.accumulate\n",
    "    kernel = pool.widen if first or last else pool.accumulate\n",
    ("tests/test_sums.py", "tests/test_host_accumulation.py"),
  ),
  Mutation(
    "a-norm-that-is-not-finite-is-no-objection",
    "runtime/speculation.py",
    "    if not math.isfinite(total):\n",
    "    if math.isinf(total):\n",
    _WITHIN_A_STEP,
  ),
  Mutation(
    "the-bound-of-the-norm-ignores-the-loss-scale",
    "runtime/speculation.py",
    "math.sqrt(total) * grad_scale > self._clip_norm",
    "math.sqrt(total) > self._clip_norm",
    _WITHIN_A_STEP,
  ),
  # Edges of the graph.
  Mutation(
    "settling-waits-for-no-validate",
    "graph/schedule.py",
    "    deps = [self._updates[bucket.index], validate]\n",
    "    deps = [self._updates[bucket.index]]\n",
    _SCHEDULE,
  ),
  Mutation(
    "fetches-wait-for-the-update-ahead-only",
    "graph/schedule.py",
    "    self._updates[bucket.index] = settle\n",
    "",
    _SCHEDULE,
  ),
  Mutation(
    "the-next-use-does-not-wait-for-the-resend",
    "graph/schedule.py",
    "      self._arrivals[bucket.index] += (resend,)\n",
    "      del resend\n",
    _SCHEDULE,
  ),
  # Failures.
  Mutation(
    "taking-back-keeps-new-weights",
    "runtime/parts.py",
    "      self.weights.load(self.state.masters)\n",
    "      pass\n",
    _FAILURES,
  ),
  Mutation(
    "taking-back-keeps-updates",
    "runtime/updates.py",
    "      if bucket.pending:\n",
    "      if bucket.pending and False:\n",
    _FAILURES,
  ),
  Mutation(
    "a-pending-bucket-loses-its-gradients",
    "runtime/updates.py",
    "    del step.host_grads[index]  #",
    "    grads.clear()  #",
    _FAILURES,
  ),
  Mutation(
    "a-restore-does-not-forget",
    "runtime/updates.py",
    "        bucket.forget()\n",
    "        pass\n",
    _FAILURES,
  ),
  Mutation(
    "a-half-taken-update-is-not-in-doubt",
    "runtime/run.py",
    "not (self.data.state_touched or self.data.speculation.in_doubt)",
    "not self.data.state_touched",
    ("tests/test_speculation_failures.py", "-k", "host_update and dma"),
  ),
  Mutation(
    "a-half-undone-update-is-not-in-doubt",
    "runtime/updates.py",
    "      step.speculation.in_doubt.add(index)\n"
    "      bucket.undo(self._pool)\n"
    "      step.speculation.in_doubt.remove(index)\n",
    "      bucket.undo(self._pool)\n",
    _FAILURES,
  ),
  Mutation(
    "failures-are-forgotten-before-they-are-dealt-with",
    "runtime/executor.py",
    "    raise next(run.failure for run in self._recent if run.failure)\n",
    "    failure = next(run.failure for run in self._recent if run.failure)\n"
    "    self.forget_failure()\n"
    "    raise failure\n",
    _INTERRUPTS,
  ),
  # The choice.
  Mutation(
    "idle-time-counts",
    "runtime/adaptive.py",
    "validated_s - idle_s",
    "validated_s",
    _ADAPTIVE,
  ),
  Mutation(
    "the-step-that-compiles-counts",
    "runtime/adaptive.py",
    "before.number == 0 or before.ahead",
    "before.ahead",
    _ADAPTIVE,
  ),
  Mutation(
    "records-cost-nothing",
    "runtime/adaptive.py",
    "_RECORD_RATIO * update_s - backward_s",
    "update_s - backward_s",
    _ADAPTIVE,
  ),
  Mutation(
    "redoing-costs-nothing",
    "runtime/adaptive.py",
    "    taken_back_s = committed_s + _REDO_RATIO * update_s\n",
    "    taken_back_s = committed_s\n",
    _ADAPTIVE,
  ),
  Mutation(
    "pauses-stay-short",
    "runtime/adaptive.py",
    "min(2 * self._pause, _LONGEST_PAUSE)",
    "min(self._pause, _LONGEST_PAUSE)",
    _ADAPTIVE,
  ),
  Mutation(
    "a-pause-is-for-ever",
    "runtime/adaptive.py",
    "        self._committed.clear()\n",
    "",
    _ADAPTIVE,
  ),
  *(Mutation(*fault) for fault in simulator_faults.FAULTS),
  Mutation(
    "paced-tasks-do-not-wait-for-their-lane",
    "runtime/pace.py",
    "        self._lane_ends_s[task.lane],\n",
    "        0.0,\n",
    _PACED,
  ),
  Mutation(
    "paced-tasks-do-not-wait-for-those-of-the-step",
    "runtime/pace.py",
    "        *self._ends_s(step, task.deps),\n",
    "",
    _PACED,
  ),
  Mutation(
    "paced-tasks-do-not-wait-for-those-of-the-step-before",
    "runtime/pace.py",
    "        *self._ends_s(step - 1, task.prev_deps),\n",
    "",
    _PACED,
  ),
  Mutation(
    "paced-waits-end-at-once",
    "runtime/pace.py",
    "    time.sleep(left_s)\n",
    "    break\n",
    _PACED,
  ),
  Mutation(
    "paced-buffers-are-free-when-they-are-sent",
    "runtime/paced_device.py",
    "    end_s = self._pace.begin(task, step.number)\n\n"
    "    def wait() -> None:\n"
    "      try:\n",
    "    self._weights.give_back(bucket, buffers)\n"
    "    buffers = []\n"
    "    end_s = self._pace.begin(task, step.number)\n\n"
    "    def wait() -> None:\n"
    "      try:\n",
    _PACED,
  ),
  Mutation(
    "paced-steps-do-not-count",
    "runtime/paced.py",
    "        self.count += 1\n",
    "        pass\n",
    _PACED,
  ),
]


class Copy:
  """A copy of the package, whose lines can be changed and changed back."""

  def __init__(self, directory: pathlib.Path):
    self._package = directory
    for name in ("sojax", "tests"):
      shutil.copytree(
        _ROOT / name,
        directory / name,
        ignore=shutil.ignore_patterns("__pycache__"),
      )
    shutil.copy(_ROOT / "pyproject.toml", directory)

  def replace(self, file: str, old: str, new: str) -> None:
    """Replaces what stands in a file exactly once."""
    path = self._package / "sojax" / file
    text = path.read_text()
    if text.count(old) != 1:
      raise RuntimeError(f"{file} has {text.count(old)} times: {old}")
    path.write_text(text.replace(old, new))

  def restore(self, file: str) -> None:
    """Brings a file back."""
    shutil.copy(_ROOT / "sojax" / file, self._package / "sojax" / file)

  def test(self, tests) -> subprocess.CompletedProcess:
    """Runs fast tests, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header"]
    return subprocess.run(
      [*command, "--tb=line", "-m", "not slow", *tests],
      cwd=self._package,
      env={**os.environ, "PYTHONPATH": str(self._package)},
      capture_output=True,
      text=True,
      timeout=120,
    )


def is_caught(copy: Copy, mutation: Mutation) -> bool:
  """Makes a mutation, runs its tests, and takes it back."""
  copy.replace(mutation.file, mutation.old, mutation.new)
  try:
    result = copy.test(mutation.tests)
    lines = [x for x in result.stdout.splitlines() if x.startswith("FAILED")]
    print("  ", lines[0] if lines else f"exit status {result.returncode}")
  except subprocess.TimeoutExpired:
    print("   hangs")
    return True
  finally:
    copy.restore(mutation.file)
  # Below 0: ended by a signal.
  return result.returncode == 1 or result.returncode < 0


def main(names: list[str]) -> int:
  """Returns the number of mutations that no test noticed."""
  if names == ["--list"]:
    print(*(x.name for x in MUTATIONS), sep="\n")
    return 0
  chosen = [x for x in MUTATIONS if not names or x.name in names]
  missed = []
  with tempfile.TemporaryDirectory(prefix="sojax-mutations-") as directory:
    copy = Copy(pathlib.Path(directory))
    for mutation in chosen:
      print(mutation.name, flush=True)
      if not is_caught(copy, mutation):
        missed.append(mutation.name)
  print(f"{len(chosen) - len(missed)} of {len(chosen)} were noticed")
  if missed:
    print("not noticed:", *missed)
  return len(missed)


if __name__ == "__main__":
  sys.exit(min(main(sys.argv[1:]), 1))
