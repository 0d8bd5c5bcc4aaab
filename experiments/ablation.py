"""Every technique switched off in turn, and on in turn.

Question:
  What is each technique worth, with all others and with none, and how far from
  its bound is the step that it leaves?
Command:
  python -m experiments.ablation --executor=simulate|paced|jax --json=PATH
    [--picture=PATH]
Hardware:
  Two CPU cores; for paced and jax otherwise idle, and 10 GiB.
Expected time:
  simulate: half a minute. paced and jax: eight minutes each.
Expected result:
  On a GH200 "all" is no slower than any "all but X", and "none" slower than
  most "none but X". Of paced, measured_s mostly within 5 % of predicted_s; of
  jax, ratio within 15 % of 1. See docs/results/ablation.md.

The executors:
  simulate: the paper's 5B model on a GH200. Tasks of several lanes share the
    memories, which slows them down.
  paced: the same at a scale that fits here (see `experiments.scaled`), with
    nothing shared but what this machine's host shares by itself. Seconds are
    those of the GH200: the paced ones over the factor that it was slowed by.
  jax: a small model, trained on this machine. The simulation has its profile,
    measured first, and its stages', measured for each plan.

A row has predicted_s, simulated; measured_s, unless nothing was measured;
lower_bound_s, what the busiest lane or memory takes for a step if it is never
idle; and device_idle, measured if anything was. One of jax has ratio, too:
measured_s over predicted_s, the median of its rounds. The machine may change
its speed from round to round, and each measures its own stages.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging
from flax import nnx

import sojax
from experiments.ablation_plans import Sizes, variants
from experiments.plots import save_ablation
from experiments.provenance import provenance
from experiments.results import picture_path, write_result
from experiments.scaled import (
  Case,
  Scale,
  lower_bound_s,
  run_paced,
)
from sojax import data, models
from sojax.calibrate import measure_profile, measure_stages
from sojax.graph.graph import StepGraph
from sojax.graph.late import simulate_late
from sojax.graph.prices import price, price_late
from sojax.plan.config import TrainConfig
from sojax.plan.costs import Costs
from sojax.plan.hardware import HardwareProfile
from sojax.plan.machines import machine
from sojax.plan.plan import MIB, Plan
from sojax.programs.workload import gpt_workload
from sojax.runtime.setup import make_setup

_EXECUTOR = flags.DEFINE_enum(
  "executor", "simulate", ["simulate", "paced", "jax"], "What runs the steps."
)
_ROUNDS = flags.DEFINE_integer("ablation_rounds", 3, "Of paced and jax.", 1)
_ROWS = flags.DEFINE_multi_string("row", [], "Only these rows.")

_ADAMW = sojax.adamw(1e-4, b2=0.95, weight_decay=0.1)
_SCALE = Scale(divisor=16, pool_threads=1)
# The embedding and four blocks: by simulation the device is never idle then.
_LARGE = Sizes(device_buckets=25, large_device_buckets=5, few_threads=6)
_SMALL = Sizes(
  device_buckets=2,
  large_device_buckets=1,
  bucket_bytes=4 * MIB,
  large_bucket_bytes=64 * MIB,
  few_threads=1,
)
_JAX_STEPS = 6
"""Steps of a round that are measured."""

Row = dict[str, Any]


def main(argv: Sequence[str]) -> None:
  """Runs the experiment as the flags say."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]}")
  logging.set_verbosity(logging.WARNING)
  sizes = _SMALL if _EXECUTOR.value == "jax" else _LARGE
  make = {"simulate": _simulating, "paced": _pacing, "jax": _training}
  run = make[_EXECUTOR.value]()
  rows = []
  for variant in variants(sizes):
    if not _ROWS.value or variant.name in _ROWS.value:
      rows.append({"name": variant.name, **run(variant.plan)})
      print(table_line(rows[-1]), flush=True)
  config = {"executor": _EXECUTOR.value, "rounds": _ROUNDS.value}
  write_result({"rows": rows, "config": config, **provenance()})
  picture = picture_path()
  if picture is not None:
    save_ablation(rows, picture)


def table_line(row: Row) -> str:
  """Returns a row as text, its times in milliseconds."""
  names = ("predicted_s", "measured_s", "lower_bound_s")
  times = [
    f"{1e3 * row[name]:9.1f}" if name in row else 9 * " " for name in names
  ]
  ratio = f", ratio {row['ratio']:.3f}" if "ratio" in row else ""
  idle = f"idle {row['device_idle']:6.1%}"
  return f"{row['name']:36}{''.join(times)} ms, {idle}{ratio}"


def _simulating() -> Callable[[Plan], Row]:
  """Returns what simulates a plan of the 5B model on a GH200."""
  case = _large_case()

  def run(plan: Plan) -> Row:
    of_plan = dataclasses.replace(case, plan=plan)
    layout = of_plan.layout()
    graph = of_plan.graph(layout)
    return {
      **_predicted(graph, of_plan.costs(layout), case.profile),
      "plan": dataclasses.asdict(plan),
    }

  return run


def _pacing() -> Callable[[Plan], Row]:
  """Returns what paces a plan of the 5B model on a GH200."""
  case = _large_case()

  def run(plan: Plan) -> Row:
    of_plan = dataclasses.replace(case, plan=plan)
    paced = run_paced(of_plan, _SCALE, num_rounds=_ROUNDS.value).row()
    times = ("predicted_s", "measured_s", "lower_bound_s")
    return {
      **{name: paced[name] / paced["slowness"] for name in times},
      "device_idle": paced["device_idle"],
      "paced": paced,
      "plan": dataclasses.asdict(plan),
    }

  return run


def _large_case() -> Case:
  config = TrainConfig(micro_batch=8, seq_len=1024, precision="bf16")
  return Case(
    workload=gpt_workload(models.presets.gpt("5b"), config, _ADAMW),
    config=config,
    plan=Plan(),
    profile=machine("gh200"),
  )


def _training() -> Callable[[Plan], Row]:
  """Returns what trains a small model with a plan, and simulates it."""
  profile = measure_profile()
  shape = models.presets.gpt("25m")
  # No step is clipped: those that are simulated are not, either.
  config = TrainConfig(
    micro_batch=1, seq_len=256, precision="bf16", clip_norm=1e6
  )
  model = models.GPT(shape, rngs=nnx.Rngs(0))
  sampler = data.BatchSampler(
    tokens=data.encode(data.load_corpus().train), num_rows=1, seq_len=256
  )
  batches = [sampler.batch(number) for number in range(_JAX_STEPS)]

  def run(plan: Plan) -> Row:
    setup = make_setup(model, _ADAMW, config, plan, None, nnx.Param, None)
    rounds = []
    with sojax.Trainer(model, _ADAMW, config, plan) as trainer:
      _train(trainer, batches)  # compiles
      for _ in range(_ROUNDS.value):
        # The machine has states that last seconds: each round has its stages.
        stages = measure_stages(setup, vocab_size=shape.vocab_size)
        costs = Costs(
          setup.layout,
          plan,
          config,
          setup.workload,
          profile,
          stage_seconds=stages,
        )
        measured = _train(trainer, batches)
        rounds.append(_predicted(setup.graph, costs, profile) | measured)
    medians = {
      name: statistics.median(row[name] for row in rounds) for name in rounds[0]
    }
    return {
      **medians,
      "ratio": statistics.median(
        row["measured_s"] / row["predicted_s"] for row in rounds
      ),
      "rounds": rounds,
      "plan": dataclasses.asdict(plan),
    }

  return run


def _train(trainer: sojax.Trainer, batches: Sequence[data.Batch]) -> Row:
  """Returns medians over the steps of a round, but for the first ones."""
  metrics = [trainer.step(batch) for batch in batches]
  trainer.drain()
  assert not any(m.clipped or m.skipped for m in metrics)
  timeline = trainer.timeline()
  last = max(span.step for span in timeline.spans) - 1
  first = last - len(batches) + 3
  ends_s = [timeline.step_end_s(i) for i in range(first - 1, last + 1)]
  newest = timeline.cycle(first, last)
  return {
    "measured_s": statistics.median(
      b - a for a, b in itertools.pairwise(ends_s)
    ),
    "device_idle": newest.idle_s("device") / newest.window_s(),
  }


def _predicted(graph: StepGraph, costs: Costs, profile: HardwareProfile) -> Row:
  """Simulates with all that tasks share."""
  simulation, used = simulate_late(
    graph,
    price(graph, costs),
    price_late(graph, costs),
    capacities=profile.capacities,
    dispatch_s=profile.dispatch_s,
  )
  steady = simulation.steady()
  return {
    "predicted_s": simulation.step_s,
    "lower_bound_s": lower_bound_s(graph, used, profile.capacities),
    "device_idle": steady.idle_s("device") / steady.window_s(),
  }


if __name__ == "__main__":
  flags.mark_flag_as_required("json")
  app.run(main)
