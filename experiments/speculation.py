"""Measures what it costs to update ahead of validation where nothing is won.

Question:
  On a CPU device and host share cores and memory, so that an update that runs
  ahead of validation overlaps with nothing. What do records cost then, and does
  the adaptive choice find out that waiting is better?
Command:
  python -m experiments.speculation --json=PATH
Hardware:
  Two CPU cores, otherwise idle.
Expected time:
  About two minutes.
Expected result:
  Of the waiting step, update_share is at least 0.4. ratios.always (with records
  of 3 bytes) is at most 1.10, and ratios.adaptive at most 1.03, of waiting.

Every round takes a few steps with each contender, in random order, each group
waited for, and gives one ratio; the medians of these are reported, and for the
adaptive contender, whose steps differ, also the ratio of the sums.
"""

import contextlib
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags, logging
from flax import nnx

import sojax
from experiments.provenance import provenance
from experiments.results import write_result
from sojax import data, models

_ROUNDS = flags.DEFINE_integer("num_rounds", 30, "Rounds.", 1)
_STEPS = flags.DEFINE_integer("round_steps", 4, "Steps of a round.", 1)
_TOKENS = flags.DEFINE_integer(
  "step_tokens", 2, "Tokens of a step, in a row.", 1
)
_MODEL = flags.DEFINE_string("gpt", "25m", "Name of the model's preset.")
_PRECISION = flags.DEFINE_enum(
  "working_precision", "fp32", ["fp32", "bf16"], "Working precision."
)

_WARM_UP_ROUNDS = 2
# Without recomputation, and on one thread, the update has a larger share of the
# step.
_COMMON: Mapping[str, Any] = {
  "activations": "keep",
  "gradients_out": "callback",
  "pool_threads": 1,
}
_PLANS: Mapping[str, Mapping[str, Any]] = {
  "waiting": {},
  "always": {"speculation": "record3", "speculate": "always"},
  "always_record2": {"speculation": "record2", "speculate": "always"},
  "adaptive": {"speculation": "record3", "speculate": "adaptive"},
}


def main(argv: Sequence[str]) -> None:
  """Runs the experiment as the flags say."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]}")
  logging.set_verbosity(logging.WARNING)
  config = {
    "model": _MODEL.value,
    "rounds": _ROUNDS.value,
    "steps": _STEPS.value,
    "tokens": _TOKENS.value,
    "precision": _PRECISION.value,
  }
  write_result({**compare(), "config": config, **provenance()})


def compare() -> dict[str, Any]:
  """Compares all contenders."""
  config = sojax.TrainConfig(
    micro_batch=1,
    seq_len=_TOKENS.value,
    precision=_PRECISION.value,
    clip_norm=1e6,  # which no step reaches: all updates count
  )
  tokens = data.encode(data.load_corpus().train)
  sampler = data.BatchSampler(tokens=tokens, num_rows=1, seq_len=_TOKENS.value)
  model = models.GPT(models.presets.gpt(_MODEL.value), rngs=nnx.Rngs(0))
  adamw = sojax.adamw(1e-4, b2=0.95, weight_decay=0.1)
  with contextlib.ExitStack() as stack:
    trainers = {
      name: stack.enter_context(
        sojax.Trainer(model, adamw, config, {**_COMMON, **plan})
      )
      for name, plan in _PLANS.items()
    }
    measured, ahead = measure(trainers, sampler)
    timeline = trainers["waiting"].timeline()
    last = max(span.step for span in timeline.spans)
    newest = timeline.steps(last - _STEPS.value + 1, last)
  result = {
    "update_share": newest.busy_s("host") / newest.window_s(),
    **summarise(measured),
    "steps_ahead": ahead,
  }
  for name, ratio in result["ratios"].items():
    print(f"{name}: {ratio:.3f} of waiting")
  return result


def measure(
  trainers: Mapping[str, sojax.Trainer], sampler: data.BatchSampler
) -> tuple[dict[str, list[float]], dict[str, float]]:
  """Times the contenders, in random order in each round.

  Returns:
    Seconds of each, one for each round; and the fraction of its steps whose
    updates ran ahead.
  """
  order = random.Random(0)
  measured: dict[str, list[float]] = {name: [] for name in trainers}
  ahead = dict.fromkeys(trainers, 0)
  for number in range(-_WARM_UP_ROUNDS, _ROUNDS.value):
    batches = [sampler.batch(number + 100 + i) for i in range(_STEPS.value)]
    for name in order.sample(list(trainers), len(trainers)):
      trainer = trainers[name]
      start_s = time.perf_counter()
      metrics = [trainer.step(batch) for batch in batches]
      trainer.drain()
      seconds = time.perf_counter() - start_s
      if number >= 0:
        measured[name].append(seconds)
        ahead[name] += sum(m.speculated > 0 for m in metrics)
  num_steps = _ROUNDS.value * _STEPS.value
  return measured, {name: count / num_steps for name, count in ahead.items()}


def summarise(measured: Mapping[str, Sequence[float]]) -> dict[str, Any]:
  """Returns medians, and medians of the ratios to waiting of each round."""
  waiting = measured["waiting"]
  others = [name for name in measured if name != "waiting"]
  quartiles = {
    name: np.quantile(np.divide(measured[name], waiting), [0.25, 0.5, 0.75])
    for name in others
  }
  return {
    "ratios": {name: float(quartiles[name][1]) for name in others},
    "quartiles": {name: quartiles[name].tolist() for name in others},
    "ratios_of_sums": {
      name: sum(measured[name]) / sum(waiting) for name in others
    },
    "round_s": {name: statistics.median(s) for name, s in measured.items()},
    "rounds": len(waiting),
  }


if __name__ == "__main__":
  flags.mark_flag_as_required("json")
  app.run(main)
