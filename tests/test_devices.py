"""Emulated devices on few cores and threads: slow perhaps, but no hang.

Each case is a process of its own, since jax reads its environment once.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

_SCRIPT = """
import json, sys, warnings
import jax, numpy as np
import sojax
from jax.sharding import Mesh
from tests.training import batches, config, optimizer, small_gpt

mesh = Mesh(np.array(jax.devices()).reshape(-1, 1), ("data", "seq"))
with warnings.catch_warnings(record=True) as caught:
  warnings.simplefilter("always")
  trainer = sojax.Trainer(
    small_gpt(vocab_size=2048), optimizer(), config(micro_batch=1),
    json.loads(sys.argv[1]), mesh
  )
with trainer:
  data = batches(12, rows=len(jax.devices()))
  metrics = [trainer.step(batch) for batch in data]
  losses = [m.loss for m in metrics]
print(json.dumps({"losses": losses, "said": [str(w.message) for w in caught]}))
"""
_OLD = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12)


def run(plan, *, cores=None, threads="64"):
  """Trains on eight devices; returns losses and warnings."""
  environment = {k: v for k, v in os.environ.items() if k != "PJRT_NPROC"}
  environment |= {"JAX_PLATFORMS": "cpu"}
  environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
  if threads:
    environment["PJRT_NPROC"] = threads
  command = [sys.executable, "-c", _SCRIPT, json.dumps(plan)]
  if cores is not None:
    command = ["taskset", "-c", cores, *command]
  done = subprocess.run(
    command,
    env=environment,
    cwd=Path(__file__).parents[1],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset")
@pytest.mark.parametrize("gradients_out", ["dma", "callback"])
@pytest.mark.parametrize("cores", ["0", "0,1"])
def test_eight_devices_train_on_few_cores(cores, gradients_out):
  if not set(map(int, cores.split(","))) <= os.sched_getaffinity(0):
    pytest.skip(f"cores {cores} are not there")
  plan = {"bucket_bytes": 1 << 18, "gradients_out": gradients_out}
  result = run(plan, cores=cores)
  assert result["said"] == []
  assert result["losses"][-1] < result["losses"][0]


@pytest.mark.parametrize(
  "threads", [None, pytest.param("2", marks=pytest.mark.slow)]
)
def test_without_threads_enough_programs_run_one_at_a_time(threads):
  """And the trainer says so, where jax needs it."""
  few = run({"bucket_bytes": 1 << 18}, threads=threads)
  assert len(few["said"]) == _OLD
  assert all("PJRT_NPROC=64" in text for text in few["said"])
  many = run({"bucket_bytes": 1 << 18})
  np.testing.assert_allclose(few["losses"], many["losses"], rtol=1e-5)
