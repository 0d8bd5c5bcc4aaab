"""A training run in a process of its own, and the memory that it takes.

python -m tests.memory_process '{"speculation": "record3", ...}'

Prints as JSON, in bytes: "account" (host, device and the temporaries of a
stage), "gradients" (those in it), and what the process had in RAM at most
beyond what it has when the trainer is gone, in a "normal" step, in a "spike",
in "two" steps one after the other, and in a "save". The device is the host, so
that all of it is in RAM.

Wants a heap that gives freed memory back to the system at once: what it keeps
for later allocations would count as used. `call` sets the environment.
"""

import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from sojax.models.gpt import GPT
from sojax.runtime.speculation import NormWatch
from tests.speculating import let_all_run_ahead, spiking_batches, trainer
from tests.speculating_process import no_objection
from tests.training import small_gpt

ROOT = pathlib.Path(__file__).parents[1]


def call(plan: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a run with a plan prints; with the threads of one device."""
  environ = {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"}
  environ |= {
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": "",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
  }
  result = subprocess.run(
    [sys.executable, "-m", "tests.memory_process", json.dumps(plan)],
    cwd=ROOT,
    env=environ,
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout.splitlines()[-1])


def main(plan: Mapping[str, Any]) -> None:
  """Trains a GPT of 45M parameters, whose updates all run ahead if any may."""
  data = spiking_batches(8, spikes=(3, 5))
  NormWatch.objection = no_objection
  model: GPT = small_gpt(hidden_dim=768, num_layers=6, num_heads=4)
  ours = trainer(
    {"bucket_bytes": 1 << 21, **plan},
    model=model,
    precision="bf16",
    clip_norm=50.0,
  )
  peaks = {}
  with ours, tempfile.TemporaryDirectory() as directory:
    let_all_run_ahead(ours)
    for batch in data[:4]:  # compile
      ours.step(batch)
      ours.drain()
    reset_peak()
    ours.step(data[4])
    ours.drain()
    peaks["normal"] = take_peak()
    spike = ours.step(data[5])
    ours.drain()
    peaks["spike"] = take_peak()
    for batch in data[6:]:
      ours.step(batch)
    ours.drain()
    peaks["two"] = take_peak()
    ours.save(directory)
    peaks["save"] = take_peak()
    buckets = ours.layout.updated_by_host
    temp_bytes = max(stage.temp_bytes for stage in ours._setup.workload.stages)
    account = ours.account
    told = {
      "account": account.host_bytes + account.device_bytes + temp_bytes,
      "gradients": account.host["gradients"] + account.device["gradients"],
      "clipped": spike.clipped,
      "speculated": spike.speculated,
      "escapes": spike.escapes,
      "num_buckets": len(buckets),
      "num_params": sum(bucket.size for bucket in buckets),
    }
  del ours, spike
  gc.collect()
  without = status("VmRSS")
  print(json.dumps(told | {x: peak - without for x, peak in peaks.items()}))


def reset_peak() -> None:
  """Makes the most memory so far the memory that there is now."""
  pathlib.Path("/proc/self/clear_refs").write_text("5")


def take_peak() -> int:
  """Returns the most bytes in RAM since the last reset, and resets."""
  peak = status("VmHWM")
  reset_peak()
  return peak


def status(name: str) -> int:
  """Returns a figure in bytes of what the system says of this process."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(name):
      return int(line.split()[1]) << 10
  raise AssertionError(f"no {name}")


if __name__ == "__main__":
  main(json.loads(sys.argv[1]))
