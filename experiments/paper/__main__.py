"""Sets the SuperOffload paper beside simulation.

Question:
  Does the simulator, with figures of the hardware alone, find what the paper
  (arXiv 2509.21271) measured? What does sojax add to SuperOffload as published?
Command:
  python -m experiments.paper --json=PATH [--pictures=FOLDER]
Hardware:
  Any CPU; nothing is trained, and no model is allocated.
Expected time:
  Ten minutes on one core, most of it the fits.
Expected result:
  `ablation`: the signs and the order of the paper's gains; `fitted_gain` within
  15 % of each. `simulated_200b.seconds` is below ten.

Predictions take constants from experiments/paper/constants.py. The fit changes
what `fits` names, and everything under `with_fitted` uses these constants as
they are.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from experiments import plots
from experiments.paper import ablation as paper_ablation
from experiments.paper import published, systems, ulysses
from experiments.paper import scale as paper_scale
from experiments.paper.constants import (
  ATTENTION_SHARES,
  ONE_DOMAIN,
  PREDICTION,
  SENSITIVITY,
  SOURCES,
  Constants,
)
from experiments.paper.predict import predict
from experiments.provenance import provenance
from experiments.results import write_result
from sojax.plan.config import TrainConfig
from sojax.plan.hardware import HardwareProfile
from sojax.plan.workload import Workload

_PICTURES = flags.DEFINE_string("pictures", None, "Folder for pictures.")

_ABLATION_MODEL = "5b"


def main(_: Sequence[str]) -> None:
  """Predicts, fits, predicts with what was fitted, and writes all of it."""
  config = paper_scale.train_config(8, paper_scale.SEQ_LEN)
  work = paper_scale.workload(_ABLATION_MODEL, config, 1)
  seconds, predicted = paper_ablation.gains(PREDICTION, work, config)
  logging.info("predicted gains: %s", predicted)
  fits = [
    _fit(names, work, config)
    for names in (paper_ablation.FITTED, paper_ablation.FITTED_MORE)
  ]
  fitted = dataclasses.replace(PREDICTION, **fits[0]["constants"])
  result = provenance() | {
    "constants": dataclasses.asdict(PREDICTION) | {"sources": SOURCES},
    "ablation": paper_ablation.ablation_rows(
      predicted, fits[0]["gains"], fits[1]["gains"]
    ),
    "ablation_total": {
      "paper": published.ABLATION_TOTAL,
      "predicted": seconds[0] / seconds[-1],
      "fitted": fits[0]["total"],
    },
    "ablation_s": seconds,
    "fits": fits,
    "adam_s": adam_rows(),
    "predicted": scale(PREDICTION),
    "with_fitted": scale(fitted),
    "predicted_in_one_domain": scale(ONE_DOMAIN, (16,)),
    "largest": paper_scale.largest_rows(PREDICTION),
    "sequence": {
      share: ulysses.sequence_rows(
        published.SEQUENCE["model"], PREDICTION, share
      )
      for share in ATTENTION_SHARES
    },
    "sojax_over_superoffload": sensitivity(),
    "simulated_200b": simulated_200b(),
  }
  write_result(result)
  if _PICTURES.value is not None:
    save_pictures(result, Path(_PICTURES.value))


def _fit(
  names: Sequence[str], work: Workload, config: TrainConfig
) -> dict[str, Any]:
  fitted = paper_ablation.fit(PREDICTION, names, work, config)
  seconds, gains = paper_ablation.gains(fitted, work, config)
  logging.info("fitted %s: %s", names, gains)
  return {
    "constants": {name: getattr(fitted, name) for name in names},
    "degrees_of_freedom": len(gains) - len(names),
    "gains": gains,
    "total": seconds[0] / seconds[-1],
    "seconds": seconds,
  }


def scale(
  constants: Constants, numbers: Sequence[int] = (1, 4, 16)
) -> dict[str, Any]:
  """Returns throughput over model size, and the ratios that the paper gives.

  Args:
    constants: what predictions depend on.
    numbers: of devices.
  """
  rows = paper_scale.throughput_rows(constants, numbers)
  ours, base, sharded = "SuperOffload", "ZeRO-Offload", "all on device"
  return {
    "throughput": rows,
    "over_zero_offload": {
      number: paper_scale.ratios(rows, ours, base, number) for number in numbers
    },
    "over_all_on_device": {
      number: paper_scale.ratios(rows, ours, sharded, number)
      for number in numbers
    },
    "sojax_over_superoffload": {
      number: paper_scale.ratios(rows, "sojax", ours, number)
      for number in numbers
    },
  }


def adam_rows() -> list[dict[str, Any]]:
  """Returns the published seconds of Adam beside the profile's."""
  rate = PREDICTION.machine(1).host_rates["step"].at(72)
  return [
    {"params": params, "sojax_predicted": 28 * params / rate}
    | {name: seconds[params] for name, seconds in published.ADAM_S.items()}
    for params in published.ADAM_S["GraceAdam"]
  ]


def sensitivity() -> list[dict[str, Any]]:
  """Returns sojax's throughput over SuperOffload's, for other machines.

  One figure of the machine is changed at a time. sojax' backward leaves out of
  its recomputation what it does not need, which is a property of XLA; in the
  second ratio both recompute all of forward.
  """
  config = paper_scale.train_config(8, paper_scale.SEQ_LEN)
  work = paper_scale.workload(_ABLATION_MODEL, config, 1)
  rows = []
  for what, factors in SENSITIVITY.items():
    for factor in factors:
      constants, machine = PREDICTION.changed(what, factor)
      published_s, sojax_s, same_s = (
        _step_s(system, work, config, machine)
        for system in (
          systems.superoffload(constants),
          systems.sojax(),
          dataclasses.replace(systems.sojax(), recomputes_all=True),
        )
      )
      rows.append(
        {
          "changed": what,
          "factor": factor,
          "ratio": published_s / sojax_s,
          "ratio_same_recomputation": published_s / same_s,
        }
      )
  return rows


def _step_s(
  system: systems.System,
  work: Workload,
  config: TrainConfig,
  machine: HardwareProfile,
) -> float:
  found = predict(system, work, config, machine)
  assert found is not None, system.name
  return found.step_s


def simulated_200b() -> dict[str, Any]:
  """Returns how long the largest model takes, from its shape to its step."""
  config = paper_scale.train_config(1, paper_scale.SEQ_LEN)
  paper_scale.workload.cache_clear()
  start = time.perf_counter()
  work = paper_scale.workload("200b", config, 16)
  traced = time.perf_counter()
  found = predict(systems.sojax(), work, config, PREDICTION.machine(16))
  assert found is not None
  end = time.perf_counter()
  result = {
    "seconds": end - start,
    "of_which_tracing": traced - start,
    "tasks": len(found.simulation.graph.tasks),
    "step_s": found.step_s,
  }
  print(
    f"200B on 16 devices: {result['seconds']:.1f} s from the model's shape to"
    f" {result['step_s']:.1f} s a step ({result['tasks']} tasks)"
  )
  return result


def save_pictures(result: dict[str, Any], folder: Path) -> None:
  """Draws the ablation, and throughput over model size."""
  folder.mkdir(parents=True, exist_ok=True)
  plots.save_bars(
    {
      row["name"]: {
        "paper": 100 * row["paper_gain"],
        "predicted": 100 * row["predicted_gain"],
        "fitted": 100 * row["fitted_gain"],
      }
      for row in result["ablation"]
    },
    folder / "paper_ablation.png",
    label="gain over the row before, %",
  )
  groups: dict[str, dict[str, float]] = {}
  for row in result["predicted"]["throughput"]:
    if row["tflops"] is not None:
      group = groups.setdefault(f"{row['model']}\n{row['ranks']}", {})
      group[row["system"]] = row["tflops"]
  plots.save_bars(
    groups,
    folder / "paper_throughput.png",
    label="TFLOP/s a device (model, devices)",
  )


if __name__ == "__main__":
  flags.mark_flag_as_required("json")
  app.run(main)
