"""The runtime's own work: what a task costs beside what it does."""

import contextlib
import dataclasses
import statistics
import time

import numpy as np
from flax import nnx

from sojax.calibrate.timing import Effort
from sojax.models.gpt import GPT, GPTConfig
from sojax.plan.adamw import adamw
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan
from sojax.runtime.batches import Batches
from sojax.runtime.setup import Setup, make_setup
from sojax.runtime.stepper import Stepper

_CONFIG = TrainConfig(micro_batch=1, seq_len=8, precision="bf16")
_SHAPE = GPTConfig(
  vocab_size=64, num_layers=12, hidden_dim=16, num_heads=2, max_seq_len=8
)
_STEPS_AT_ONCE = 8
_WARM_UP_STEPS = 3


@dataclasses.dataclass(frozen=True)
class TaskOverhead:
  """What the runtime takes for each task of a step.

  Attributes:
    seconds: of the step, by whichever thread: Python runs one at a time.
    core_seconds: of all the process's threads.
  """

  seconds: float
  core_seconds: float


def measure_overhead(effort: Effort) -> TaskOverhead:
  """Trains a GPT so small that nothing else takes time, on one device.

  What its stages compute is counted as well: microseconds on a CPU; on a GPU, a
  few for each program and transfer. A step's tasks are issued by two threads,
  of which Python runs one at a time: so a task of either takes what the step
  takes over all of them, where the simulator lets both go on at once.
  """
  setup = _setup()
  batches = Batches(_CONFIG, _SHAPE.vocab_size, setup.placement)
  batch = {"tokens": np.zeros((1, _CONFIG.seq_len + 1), np.int32)}
  rounds: list[tuple[float, float]] = []
  with contextlib.closing(Stepper(setup)) as stepper:

    def train(num_steps: int) -> None:
      state = stepper.parts.state
      for _ in range(num_steps):
        stepper.step(batches.for_step(batch, state.scale.scale))
      stepper.executor.drain()

    train(_WARM_UP_STEPS)
    end_s = time.perf_counter() + effort.seconds
    while not rounds or time.perf_counter() < end_s:
      before_s, cpu_before_s = time.perf_counter(), time.process_time()
      train(_STEPS_AT_ONCE)
      rounds.append(
        (time.perf_counter() - before_s, time.process_time() - cpu_before_s)
      )
  num_tasks = _STEPS_AT_ONCE * len(setup.graph.tasks)
  seconds, core_seconds = map(statistics.median, zip(*rounds, strict=True))
  return TaskOverhead(seconds / num_tasks, core_seconds / num_tasks)


def _setup() -> Setup:
  model = GPT(_SHAPE, rngs=nnx.Rngs(0))
  return make_setup(model, adamw(1e-4), _CONFIG, Plan(), None, nnx.Param, None)
