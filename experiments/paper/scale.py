"""Throughput over model size, and the largest models, on 1, 4 and 16 GH200."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import sojax
from experiments.flops import train_flops_per_token
from experiments.paper import systems
from experiments.paper.constants import Constants
from experiments.paper.predict import fitting_plan, predict
from experiments.paper.systems import System
from sojax.models import presets
from sojax.plan.config import TrainConfig
from sojax.plan.workload import Workload
from sojax.programs.workload import gpt_workload

SEQ_LEN = 1024
SIZES: dict[int, tuple[str, ...]] = {
  1: ("1b", "3.5b", "5b", "8b", "13b", "15b", "20b", "25b"),
  4: ("5b", "13b", "25b", "50b"),
  16: ("13b", "50b", "80b", "200b"),
}
"""Models whose throughput is predicted, by number of devices."""

_MICRO_BATCHES = (8, 2)
_LARGEST_SEQ_LEN = 2048


def all_systems(constants: Constants) -> tuple[System, ...]:
  """Returns the systems that are compared, the paper's baselines first."""
  return (
    systems.all_on_device(),
    systems.zero_offload(constants),
    systems.fsdp_offload(constants),
    systems.superoffload(constants),
    systems.sojax(),
  )


def throughput_rows(
  constants: Constants, numbers: Sequence[int]
) -> list[dict[str, Any]]:
  """Returns a row for each system, model and number of devices.

  Each device has a micro-batch of 8, or of 2 where that does not fit.
  """
  return [
    throughput(system, name, num_ranks, constants)
    for num_ranks in numbers
    for name in SIZES[num_ranks]
    for system in all_systems(constants)
  ]


def throughput(
  system: System, name: str, num_ranks: int, constants: Constants
) -> dict[str, Any]:
  """Returns what a system reaches; None where the model does not fit."""
  row = {"system": system.name, "model": name, "ranks": num_ranks}
  machine = constants.machine(num_ranks)
  for micro_batch in _MICRO_BATCHES:
    config = train_config(micro_batch, SEQ_LEN)
    found = predict(system, workload(name, config, num_ranks), config, machine)
    if found is None:
      continue
    tokens = micro_batch * SEQ_LEN
    flops = train_flops_per_token(presets.gpt(name), SEQ_LEN) * tokens
    flops_per_s = flops / found.step_s
    cycle = found.simulation.steady()
    return row | {
      "micro_batch": micro_batch,
      "weights": found.plan.weights,
      "device_buckets": found.plan.device_buckets,
      "step_s": found.step_s,
      "tflops": flops_per_s / 1e12,
      "mfu": flops_per_s / machine.device_flops["float16"],
      "device_idle": cycle.idle_s("device") / cycle.window_s(),
    }
  return row | {"micro_batch": None, "tflops": None}


def ratios(
  rows: Sequence[dict[str, Any]], of: str, over: str, num_ranks: int
) -> dict[str, float]:
  """Returns one system's throughput over another's, by model.

  Where one of the two does not fit there is none.
  """
  found = {
    (row["system"], row["model"]): row["tflops"]
    for row in rows
    if row["ranks"] == num_ranks
  }
  return {
    model: found[of, model] / found[over, model]
    for (system, model), tflops in found.items()
    if system == of and tflops and found[over, model]
  }


def largest_rows(constants: Constants) -> list[dict[str, Any]]:
  """Returns the largest preset that fits, by system and number of devices.

  Sequences of 2048 tokens, one for each device.
  """
  config = train_config(1, _LARGEST_SEQ_LEN)
  rows = []
  for system in all_systems(constants):
    for num_ranks in SIZES:
      machine = constants.machine(num_ranks)
      for name in reversed(presets.NAMES):
        found = fitting_plan(
          system, workload(name, config, num_ranks), config, machine
        )
        if found is not None:
          break
      else:
        name = None
      rows.append({"system": system.name, "ranks": num_ranks, "model": name})
  return rows


def train_config(micro_batch: int, seq_len: int) -> TrainConfig:
  """Returns the paper's way of training: fp16, clipped."""
  return TrainConfig(
    micro_batch=micro_batch, seq_len=seq_len, precision="fp16", clip_norm=1.0
  )


@functools.lru_cache(maxsize=128)
def workload(name: str, config: TrainConfig, num_ranks: int) -> Workload:
  """Returns the workload of a preset, which is traced once."""
  shape = presets.gpt(name)
  length = max(shape.max_seq_len, config.seq_len)
  shape = dataclasses.replace(shape, max_seq_len=length)
  return gpt_workload(shape, config, sojax.adamw(1e-3), num_ranks)
