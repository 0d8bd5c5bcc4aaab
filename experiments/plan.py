"""Chooses a plan for a GPT on a machine, and says why. Allocates nothing.

Question:
  How should this model be trained on that machine, how long does a step take,
  and what limits it? Or: what is the largest model that can be trained there?
Command:
  python -m experiments.plan --model=gpt-25b --hardware=gh200 --seq_len=2048
  python -m experiments.plan --hardware=gh200 --largest
Hardware:
  Any; the machine planned for is built in, or a profile that
  experiments.calibrate has written.
Expected time:
  About five seconds; --largest about twenty.
Expected result:
  Tables: the plan, what each technique contributes, the runner-up, how busy
  each lane is, what limits the step, and the bytes on host and device. With
  --json the keys fits, step_s, memory, limit, choice; with --largest also
  largest, largest_params and mode, of the largest of all; and frontier, which
  has them for each way to train.

All times are simulated; see docs/results for how far simulation is off.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

import sojax
from experiments.provenance import provenance
from experiments.results import write_result
from sojax.models import GPTConfig, presets
from sojax.plan.hardware import HardwareProfile
from sojax.plan.machines import MACHINES, machine
from sojax.planner.evaluate import Candidate
from sojax.planner.explain import environment, explain, switches
from sojax.planner.problem import Problem
from sojax.planner.search import DoesNotFit, Ranking, fits, search
from sojax.programs.workload import gpt_workload

FLAGS = flags.FLAGS

_WAITING = {"speculation": "wait", "max_record_bytes": None}
MODES: Mapping[str, Mapping[str, Any]] = {
  "all host buckets run ahead": {
    "speculation": "record2",
    "max_record_bytes": None,
  },
  "waiting": {**_WAITING, "park": "host"},
  "waiting, gradients parked on the device": {**_WAITING, "park": "device"},
}
"""Ways to train, from fast to frugal, and the switches that they are."""


def define_flags() -> None:
  """Defines the flags; only when run, since other scripts have some as well."""
  flags.DEFINE_string(
    "model", "gpt-25b", "Preset of a GPT; --largest takes its width."
  )
  flags.DEFINE_string(
    "hardware",
    "gh200",
    f"A machine ({', '.join(MACHINES)}), or the file of a profile.",
  )
  flags.DEFINE_integer("seq_len", 2048, "Tokens of a sequence.", 1)
  flags.DEFINE_integer("micro_batch", 1, "Rows on a device.", 1)
  flags.DEFINE_integer("accumulation", 1, "Micro-batches.", 1)
  flags.DEFINE_enum(
    "precision", "bf16", ["bf16", "fp16", "fp32"], "Of the working weights."
  )
  flags.DEFINE_integer("data", 1, "Devices of the data axis.", 1)
  flags.DEFINE_string(
    "plan", "{}", "Switches that are given, as JSON, or a file of it."
  )
  flags.DEFINE_bool(
    "largest",
    False,
    "Find how many blocks of the model's width fit, by each way to train.",
  )


def main(argv: Sequence[str]) -> None:
  """Plans as the flags say."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]}")
  profile, forced = _profile(FLAGS.hardware), _forced(FLAGS.plan)
  model = presets.gpt(FLAGS.model.removeprefix("gpt-"))
  if FLAGS.largest:
    result = find_largest(model, profile, forced)
  else:
    result = plan(model, profile, forced)
  write_result({**result, **provenance()})


def plan(
  model: GPTConfig, profile: HardwareProfile, forced: Mapping[str, Any]
) -> dict[str, Any]:
  """Plans one model; prints the tables and returns the result."""
  try:
    ranking = search(problem_of(model, profile, forced))
  except DoesNotFit as error:
    print(error)
    return _result(error.nearest)
  print(explain(ranking))
  return _result(ranking.best)


def find_largest(
  model: GPTConfig, profile: HardwareProfile, forced: Mapping[str, Any]
) -> dict[str, Any]:
  """Finds the largest model of a width by each mode, the fastest one first.

  Prints how they are trained, and the bytes that each takes; returns the
  largest of all, and all of them as "frontier".
  """
  found = {}
  for mode, switches_of_mode in MODES.items():
    if any(forced.get(x, y) != y for x, y in switches_of_mode.items()):
      print(f"{mode}: not with the switches that are given")
      continue
    largest = _largest(model, profile, {**forced, **switches_of_mode})
    if largest is None:
      print(f"{mode}: not one block of width {model.hidden_dim} fits")
    else:
      found[mode] = largest
  if not found:
    return {"fits": False, "largest": None, "largest_params": 0, "frontier": []}
  frontier = [_row(mode, *largest) for mode, largest in found.items()]
  _, best = max(found.values(), key=lambda item: item[0].num_layers)
  print(explain(best))
  print(f"\n{_frontier_table(frontier)}")
  largest = max(frontier, key=lambda row: row["largest_params"])
  return {**_result(best.best), **largest, "frontier": frontier}


def _largest(
  model: GPTConfig, profile: HardwareProfile, forced: Mapping[str, Any]
) -> tuple[GPTConfig, Ranking] | None:
  """Finds the most blocks of a width that fit, and how to train them.

  A model with more blocks takes more memory, whatever the plan, so that they
  are found by bisection.
  """

  def problem(num_layers: int) -> Problem:
    return problem_of(
      dataclasses.replace(model, num_layers=num_layers), profile, forced
    )

  low, high = 0, 1
  while fits(problem(high)):
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(problem(middle)) else (low, middle)
  if not low:
    return None
  ranking = search(problem(low))
  return dataclasses.replace(model, num_layers=low), ranking


def _row(mode: str, model: GPTConfig, ranking: Ranking) -> dict[str, Any]:
  return {
    "mode": mode,
    "largest": f"{model.num_layers} x {model.hidden_dim}",
    "largest_params": _num_params(ranking.best),
    "step_s": ranking.best.step_s,
    "choice": switches(ranking.best.plan),
    "memory": ranking.best.memory(),
  }


def _num_params(candidate: Candidate) -> int:
  leaves = candidate.problem.workload.model.leaves
  return sum(leaf.size for leaf in leaves)


def _frontier_table(frontier: Sequence[Mapping[str, Any]]) -> str:
  """Returns what is the largest by each mode, and the bytes it takes."""
  lines = [f"{'mode':<42} {'largest':>10} {'1e9 params':>10} {'step_s':>8}"]
  for row in frontier:
    params = row["largest_params"] / 1e9
    lines.append(
      f"{row['mode']:<42} {row['largest']:>10} {params:>10.2f}"
      f" {row['step_s']:>8.3f}"
    )
  memories = [row["memory"] for row in frontier]
  lines.append(f"\n{'GiB, modes as above':<26}")
  for space, part in memories[0].items():
    for name in [*part, "in all"]:
      sizes = [{**m[space], "in all": sum(m[space].values())} for m in memories]
      if any(of_mode[name] for of_mode in sizes):
        gib = "".join(f"{x[name] / 2**30:>10.2f}" for x in sizes)
        lines.append(f"{space} {name:<{25 - len(space)}}{gib}")
  return "\n".join(lines)


def problem_of(
  model: GPTConfig, profile: HardwareProfile, forced: Mapping[str, Any]
) -> Problem:
  """Returns what is to be planned, as the flags say."""
  config = sojax.TrainConfig(
    micro_batch=FLAGS.micro_batch,
    seq_len=FLAGS.seq_len,
    accumulation=FLAGS.accumulation,
    precision=FLAGS.precision,
  )
  long_enough = max(model.max_seq_len, config.seq_len)
  model = dataclasses.replace(model, max_seq_len=long_enough)
  workload = gpt_workload(model, config, sojax.adamw(1e-4), FLAGS.data)
  return Problem(
    workload=workload, config=config, profile=profile, forced=forced
  )


def _result(candidate: Candidate) -> dict[str, Any]:
  result: dict[str, Any] = {
    "fits": candidate.fits,
    "choice": switches(candidate.plan),
    "memory": candidate.memory(),
    "available": candidate.problem.available_bytes,
  }
  if candidate.fits:
    result |= {
      "step_s": candidate.step_s,
      "limit": candidate.limit,
      "environment": environment(candidate),
    }
  return result


def _profile(name: str) -> HardwareProfile:
  return HardwareProfile.load(name) if Path(name).exists() else machine(name)


def _forced(text: str) -> dict[str, Any]:
  path = Path(text)
  try:
    forced = json.loads(path.read_text() if path.is_file() else text)
  except json.JSONDecodeError as error:
    raise ValueError(
      f"--plan={text} is neither JSON nor a file of it: {error}"
    ) from error
  if not isinstance(forced, dict):
    raise ValueError(f"--plan={text} must be a mapping of switches")
  return forced


if __name__ == "__main__":
  define_flags()
  app.run(main)
