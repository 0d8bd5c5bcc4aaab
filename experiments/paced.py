"""The runtime against its simulation, and against its bound, without a GPU.

Question:
  The executor and the simulator follow the same rules: do they agree on what a
  step takes, whatever limits it? And how close does the runtime come to the
  time of its busiest lane, on the paper's 5B model with everything on?
Command:
  python -m experiments.paced --json=PATH --picture=PATH
Hardware:
  Two CPU cores and 10 GiB, otherwise idle.
Expected time:
  About twelve minutes.
Expected result:
  Each plan's measured_over_predicted within 5 % of 1. Of `overlap`,
  measured_over_lower_bound at most 1.03 and device_idle at most 0.03.

Device and link only take time here, and host updates are real. See
`experiments.scaled`: models keep a fraction of their parameters, machines are
slowed down to the host's updates on this one. What the host's tasks take is
measured before the steps and after: for the simulation in the runtime, with a
device and a link that take no time; for the bound by their kernels alone.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags, logging

import sojax
from experiments.plots import save_comparison
from experiments.provenance import provenance
from experiments.results import picture_path, write_result
from experiments.scaled import Case, Scale, run_paced
from sojax.models import presets
from sojax.plan.config import TrainConfig
from sojax.plan.machines import machine
from sojax.plan.plan import MIB, Plan
from sojax.programs.workload import gpt_workload

_ROUNDS = flags.DEFINE_integer("paced_rounds", 4, "Rounds of each run.", 1)
_PARTS = flags.DEFINE_multi_enum(
  "part", ["plans", "overlap"], ["plans", "overlap"], "What to measure."
)
_SEQ_LEN = 1024

_AHEAD: Mapping[str, Any] = {"speculation": "record3", "speculate": "always"}
EVERYTHING: Mapping[str, Any] = {**_AHEAD, "device_buckets": 25}
"""The paper's 5B model on a GH200: device buckets as many as its device needs
to be never idle, by simulation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setting:
  """A plan, and where what is slow.

  Attributes:
    machine: name of the machine.
    micro_batch: sequences of 1024 tokens.
    accumulation: micro-batches of a step.
    plan: switches of the plan.
  """

  machine: str = "gh200"
  micro_batch: int = 8
  accumulation: int = 1
  plan: Mapping[str, Any]


_PLANS: Mapping[str, _Setting] = {
  "ahead, device buckets": _Setting(plan={**_AHEAD, "device_buckets": 4}),
  "waits": _Setting(plan={}),
  "host-bound": _Setting(micro_batch=2, plan=_AHEAD),
  "flow, h2d-bound": _Setting(
    machine="h200-pcie",
    micro_batch=1,
    accumulation=4,
    plan={**_AHEAD, "weights": "flow", "weight_cast": "device"},
  ),
  "host sums, d2h-bound": _Setting(
    machine="h200-pcie",
    micro_batch=1,
    accumulation=4,
    plan={"accumulate": "host", "grad_cast": "device"},
  ),
  "parked": _Setting(machine="h200-pcie", plan={"park": "device"}),
  "half on the device": _Setting(plan={"device_buckets": 32}),
  "offloads": _Setting(
    machine="a100-pcie",
    micro_batch=4,
    plan={**_AHEAD, "activations": "offload"},
  ),
  "large buckets": _Setting(plan={**_AHEAD, "bucket_bytes": 1152 * MIB}),
  "split, callback": _Setting(
    micro_batch=4,
    plan={
      "speculation": "record2",
      "speculate": "always",
      "master": "split",
      "gradients_out": "callback",
    },
  ),
}


def main(argv: Sequence[str]) -> None:
  """Runs the experiment as the flags say."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]}")
  logging.set_verbosity(logging.WARNING)
  result: dict[str, Any] = {}
  if "overlap" in _PARTS.value:
    result["overlap"] = measure_overlap()
  if "plans" in _PARTS.value:
    result["plans"] = {name: row for name, row in compare_plans()}
  write_result({**result, "rounds": _ROUNDS.value, **provenance()})


def measure_overlap() -> dict[str, Any]:
  """Measures the 5B model on a GH200, and draws its steps."""
  setting = _Setting(plan=EVERYTHING)
  scale = Scale(divisor=12, pool_threads=1)
  case = make_case("5b", setting)
  run = run_paced(case, scale, num_rounds=_ROUNDS.value)
  picture = picture_path()
  if picture is not None:
    save_comparison(run.predicted_timeline, run.timeline, picture)
  row = run.row()
  _print_row("5b on gh200", row)
  return row


def compare_plans() -> Iterator[tuple[str, dict[str, Any]]]:
  """Measures and simulates ten plans of the 1B model.

  Yields:
    The name of each, and its figures.
  """
  scale = Scale(divisor=4, pool_threads=1)
  for name, setting in _PLANS.items():
    case = make_case("1b", setting)
    row = run_paced(case, scale, num_rounds=_ROUNDS.value).row()
    _print_row(name, row)
    yield name, row


def make_case(preset: str, setting: _Setting) -> Case:
  """Returns a preset on a machine."""
  config = TrainConfig(
    micro_batch=setting.micro_batch,
    seq_len=_SEQ_LEN,
    accumulation=setting.accumulation,
    precision="bf16",
  )
  adamw = sojax.adamw(1e-4, b2=0.95, weight_decay=0.1)
  return Case(
    workload=gpt_workload(presets.gpt(preset), config, adamw),
    config=config,
    plan=Plan(**setting.plan),
    profile=machine(setting.machine),
  )


def _print_row(name: str, row: Mapping[str, Any]) -> None:
  print(
    f"{name:22} bound by {row['bound_by']:6} step {row['measured_s']:.3f} s,"
    f" {row['measured_over_predicted']:.3f} of predicted"
    f" ({row['measured_over_by_kernels']:.3f} with kernels alone),"
    f" {row['measured_over_lower_bound']:.3f} of the bound, device idle"
    f" {row['device_idle']:.1%}",
    flush=True,
  )


if __name__ == "__main__":
  flags.mark_flag_as_required("json")
  app.run(main)
