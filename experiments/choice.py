"""Whether the plan that the planner chooses is the fastest there is.

Question:
  How far is the planner's choice from the best of several plans that differ in
  what limits them, all of them measured?
Command:
  python -m experiments.choice --json=PATH
Hardware:
  Two CPU cores and 16 GiB, otherwise idle.
Expected time:
  About four minutes for each machine.
Expected result:
  chosen_over_best of each machine at most 1.03.

Steps are paced: device and link only take time, host updates are real (see
`experiments.scaled`). The machines have 10 GiB of device memory, less than the
1B model and its state, and this machine's host: its rates, and what dispatch
takes, measured first.
All plans of a machine are slowed down alike. Each is measured once, in random
order; then the best of those named here and the planner's again, in pairs.
"""

import dataclasses
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags, logging

import sojax
from experiments.provenance import provenance
from experiments.results import write_result
from experiments.scaled import Case, Scale, measure_step, scaled_trainer
from sojax.calibrate import Effort
from sojax.calibrate.host import measure_host
from sojax.calibrate.runtime import measure_overhead
from sojax.models import presets
from sojax.plan.config import TrainConfig
from sojax.plan.hardware import Curve, HardwareProfile
from sojax.plan.machines import machine
from sojax.plan.plan import MIB
from sojax.planner.evaluate import Candidate, Evaluator
from sojax.planner.problem import Problem
from sojax.planner.search import search
from sojax.programs.workload import gpt_workload
from sojax.runtime.paced import PacedTrainer

_MACHINES = flags.DEFINE_multi_string(
  "choice_machine", ["gh200", "h200-pcie", "a100-pcie"], "Machines to plan for."
)
_PAIRS = flags.DEFINE_integer(
  "choice_pairs", 7, "Of the best plan and the chosen.", 1
)

_SCALE = Scale(divisor=4, pool_threads=1)
_DEVICE_BYTES = 10 << 30
_NOTHING_SHARED = 1e18
_CONFIG = TrainConfig(micro_batch=8, seq_len=1024, precision="bf16")

_AHEAD: Mapping[str, Any] = {"speculation": "record3", "speculate": "always"}
_PLANS: Mapping[str, Mapping[str, Any]] = {
  "waits": {},
  "ahead": _AHEAD,
  "copies": {**_AHEAD, "speculation": "pingpong"},
  "device buckets": {"device_buckets": 4},
  "ahead, device buckets": {**_AHEAD, "device_buckets": 4},
  "ahead, twice as many": {**_AHEAD, "device_buckets": 8},
  "records of 2 bytes, 256 MiB": {
    "speculation": "record2",
    "speculate": "always",
    "bucket_bytes": 256 * MIB,
    "device_buckets": 2,
  },
  "separate casts": {
    "grad_cast": "host_separate",
    "weight_cast": "host_separate",
  },
  "float32 on the wire": {
    **_AHEAD,
    "grad_cast": "device",
    "weight_cast": "device",
  },
  "flow": {**_AHEAD, "weights": "flow"},
  "parked": {"park": "device"},
  "large buckets": {**_AHEAD, "bucket_bytes": 1152 * MIB},
  "offloads": {**_AHEAD, "activations": "offload"},
}


def main(argv: Sequence[str]) -> None:
  """Runs the experiment as the flags say."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]}")
  logging.set_verbosity(logging.WARNING)
  rates = one_thread_rates()
  dispatch_s = measure_overhead(Effort()).seconds
  machines = {
    name: compare(problem(machine(name), rates, dispatch_s))
    for name in _MACHINES.value
  }
  host = {"rates": rates, "dispatch_s": dispatch_s}
  print(f"dispatch {1e3 * dispatch_s:.3f} ms")
  write_result({"host": host, "machines": machines, **provenance()})


def one_thread_rates() -> dict[str, float]:
  """Measures bytes/s of the host's operations with one thread."""
  rates = measure_host(Effort(host_elems=1 << 24)).rates
  return {name: curve.at(1) for name, curve in rates.items()}


def problem(
  profile: HardwareProfile, rates: Mapping[str, float], dispatch_s: float
) -> Problem:
  """Returns what is planned: the large model with this machine's host.

  Args:
    profile: the large machine.
    rates: bytes/s of the host's operations on the small model. On the large one
      they are as many times larger as it is.
    dispatch_s: of this machine.
  """
  host = {name: _SCALE.divisor * rate for name, rate in rates.items()}
  there = profile.host_rates["step"].at(profile.host_cores)
  slowed = profile.slowed(there / host["step"])
  paced = dataclasses.replace(
    slowed,
    device_bytes=_DEVICE_BYTES,
    host_rates={name: Curve.flat(rate) for name, rate in host.items()},
    host_cores=1,
    host_bandwidth=_NOTHING_SHARED,
    dispatch_s=dispatch_s,
  )
  workload = gpt_workload(
    presets.gpt("1b"),
    _CONFIG,
    sojax.adamw(1e-4, b2=0.95, weight_decay=0.1),
  )
  return Problem(workload=workload, config=_CONFIG, profile=paced)


def compare(given: Problem) -> dict[str, Any]:
  """Measures all plans of a machine, then the best and the chosen in pairs."""
  chosen = search(given).best
  named = dict(_fitting(given))
  order = [*named]
  random.Random(0).shuffle(order)
  rows = {name: _row(name, named[name]) for name in order}
  best = min(rows, key=lambda name: rows[name]["measured_s"])
  pairs = _pairs(chosen, named[best])
  ratio = statistics.median(ours / theirs for ours, theirs in pairs)
  print(f"chosen: {chosen.plan}", flush=True)
  print(f"{given.profile.name}: chosen over {best}: {ratio:.3f}", flush=True)
  return {
    "plans": rows,
    "best": best,
    "chosen": dataclasses.asdict(chosen.plan),
    "chosen_predicted_s": chosen.step_s,
    "chosen_measured_s": statistics.median(ours for ours, _ in pairs),
    "pairs": pairs,
    "chosen_over_best": ratio,
  }


def _fitting(given: Problem) -> Iterator[tuple[str, Candidate]]:
  evaluate = Evaluator(given)
  for name, switches in _PLANS.items():
    candidate = evaluate(given.plan(switches))
    if candidate.fits:
      yield name, candidate
    else:
      print(f"{name} does not fit: {candidate.shortages[0]}", flush=True)


def _row(name: str, candidate: Candidate) -> dict[str, Any]:
  with _paced(candidate) as trainer:
    measured_s = measure_step(trainer)
  row = {
    "measured_s": measured_s,
    "predicted_s": candidate.step_s,
    "limit": candidate.limit,
  }
  ratio = measured_s / candidate.step_s
  print(
    f"{measured_s:.3f} s, {ratio:.3f} of predicted, {candidate.limit}: {name}",
    flush=True,
  )
  return row


def _pairs(chosen: Candidate, best: Candidate) -> list[tuple[float, float]]:
  pairs = []
  with _paced(chosen) as ours, _paced(best) as theirs:
    for number in range(_PAIRS.value):
      first, second = (ours, theirs) if number % 2 else (theirs, ours)
      seconds = {trainer: measure_step(trainer) for trainer in (first, second)}
      pairs.append((seconds[ours], seconds[theirs]))
  return pairs


def _paced(candidate: Candidate) -> PacedTrainer:
  """Returns what takes paced steps with a plan."""
  given = candidate.problem
  case = Case(
    workload=given.workload,
    config=given.config,
    plan=candidate.plan,
    profile=given.profile,
  )
  trainer = scaled_trainer(case, _SCALE)
  trainer.set_costs(case.price(candidate.layout, candidate.graph))
  return trainer


if __name__ == "__main__":
  flags.mark_flag_as_required("json")
  app.run(main)
