"""Compares a training step with plain jax + optax, in the same process.

Question:
  What does the step cost when there is nothing to win? On a CPU device and
  host share the cores, so offloading can only lose time.
Command:
  python -m experiments.overhead --json=PATH       (or: make bench)
Hardware:
  Two CPU cores, otherwise idle.
Expected time:
  About six minutes.
Expected result:
  ratio_median is at most 1.10 for each size: sojax's time over that of the
  faster of one_jit (gradients with rematerialisation and optax in one program)
  and two_jits (gradients in one, optax in another), see sojax.reference.loop.

sojax keeps its activations by default, as two_jits does;
--activations=recompute compares like with like for one_jit.

Every round takes one step with each contender, in random order, each waited
for, and gives one ratio; a median of ratios so paired is not misled by other
load, nor by an order. The rows say where the time goes:

  gradients: sojax's forward and backward, by its timeline, against the
    gradients of two_jits alone.
  transfer: what sojax's lanes to and from the host were busy for; the plain
    contenders transfer nothing.
  update: sojax's host updates, by its timeline, against clipping and optax in
    a program of their own, donated.
  callback: sojax's whole step with gradients that leave by host callbacks while
    backward runs, against the same with transfers after it ("dma").
"""

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags, logging
from flax import nnx

import sojax
from experiments.provenance import provenance
from experiments.results import write_result
from sojax import data, models
from sojax.graph.timeline import Timeline
from sojax.reference.loop import Loop

_ROUNDS = flags.DEFINE_integer("rounds", 15, "Rounds of each size.", 1)
_TOKENS = flags.DEFINE_multi_integer(
  "tokens", [512, 4096], "Tokens of a step; repeat for several.", 1
)
_ROW_TOKENS = flags.DEFINE_integer("row_tokens", 512, "Tokens of a row.", 1)
_MODEL = flags.DEFINE_string("model", "25m", "Name of the model's preset.")
_ACTIVATIONS = flags.DEFINE_enum(
  "activations", "keep", ["keep", "recompute", "offload"], "sojax's policy."
)

_WARM_UP_ROUNDS = 2
_CLIP_NORM = 1.0
_ADAMW: Mapping[str, Any] = {
  "learning_rate": 1e-4,
  "b2": 0.95,
  "weight_decay": 0.1,
}

Samples = dict[str, list[float]]
"""Seconds by what took them, one for each round."""


def main(argv: Sequence[str]) -> None:
  """Runs the experiment as the flags say."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]}")
  logging.set_verbosity(logging.WARNING)
  config = {
    "model": _MODEL.value,
    "rounds": _ROUNDS.value,
    "tokens": _TOKENS.value,
    "row_tokens": _ROW_TOKENS.value,
    "activations": _ACTIVATIONS.value,
  }
  for tokens in _TOKENS.value:
    if tokens % _ROW_TOKENS.value:
      raise ValueError(
        f"tokens={tokens} is not a multiple of row_tokens="
        f"{_ROW_TOKENS.value}; change one of them"
      )
  sizes = [compare(tokens) for tokens in _TOKENS.value]
  result = {"sizes": sizes, "config": config, **provenance()}
  write_result(result)


def compare(tokens: int) -> dict[str, Any]:
  """Compares all contenders at `tokens` tokens a step."""
  num_rows, seq_len = tokens // _ROW_TOKENS.value, _ROW_TOKENS.value
  config = sojax.TrainConfig(
    micro_batch=num_rows, seq_len=seq_len, clip_norm=_CLIP_NORM
  )
  text = data.encode(data.load_corpus().train)
  sampler = data.BatchSampler(tokens=text, num_rows=num_rows, seq_len=seq_len)
  batch = sampler.batch(0)
  model = models.GPT(models.presets.gpt(_MODEL.value), rngs=nnx.Rngs(0))
  plain = plain_contenders(model, config, batch)
  with contextlib.ExitStack() as stack:
    ours, by_callback = (
      stack.enter_context(
        sojax.Trainer(model, sojax.adamw(**_ADAMW), config, plan)
      )
      for plan in _plans()
    )
    contenders = {
      "sojax": functools.partial(_step, ours, batch),
      "sojax_callback": functools.partial(_step, by_callback, batch),
    }
    measured, lanes = measure(contenders | plain, _ROUNDS.value, ours.timeline)
  result = {"tokens": tokens, **summarise(measured, lanes)}
  print(f"{tokens} tokens: {result['ratio_median']:.3f} of {result['faster']}")
  return result


def _plans() -> list[dict[str, str]]:
  activations = {"activations": _ACTIVATIONS.value}
  return [
    activations | {"gradients_out": transport}
    for transport in ("dma", "callback")
  ]


def _step(trainer: sojax.Trainer, batch: data.Batch) -> None:
  trainer.step(batch)
  trainer.drain()


def plain_contenders(
  model: models.GPT, config: sojax.TrainConfig, batch: data.Batch
) -> dict[str, Callable[[], None]]:
  """Returns the plain steps, and the two parts of one, each to be timed.

  Args:
    model: copied by each.
    config: batch and clipping.
    batch: what each call trains on.
  """
  optimizer = optax.adamw(**_ADAMW)
  one_jit = Loop(model, optimizer, config, variant="one_jit")
  two_jits = Loop(model, optimizer, config, variant="two_jits")
  update = plain_update(model, config, optimizer, batch)

  def step(loop: Loop) -> None:
    loop.step(batch)
    jax.block_until_ready((loop.params, loop.opt_state))

  return {
    "one_jit": lambda: step(one_jit),
    "two_jits": lambda: step(two_jits),
    "gradients": lambda: jax.block_until_ready(two_jits.loss_and_grads(batch)),
    "update": update,
  }


def plain_update(
  model: models.GPT,
  config: sojax.TrainConfig,
  optimizer: optax.GradientTransformation,
  batch: data.Batch,
) -> Callable[[], None]:
  """Returns a call that clips and updates by optax, donated, and waits."""
  loop = Loop(model, optimizer, config)
  params, (_, grads) = loop.params, loop.loss_and_grads(batch)
  clipped = optax.chain(optax.clip_by_global_norm(_CLIP_NORM), optimizer)
  state = (params, clipped.init(params))

  @functools.partial(jax.jit, donate_argnums=0)
  def apply(state, grads):
    params, opt_state = state
    updates, opt_state = clipped.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def update() -> None:
    nonlocal state
    state = jax.block_until_ready(apply(state, grads))

  return update


def measure(
  contenders: Mapping[str, Callable[[], None]],
  num_rounds: int,
  timeline: Callable[[], Timeline],
) -> tuple[Samples, Samples]:
  """Times the contenders, in random order in each round.

  Args:
    contenders: calls that wait for what they start.
    num_rounds: rounds to measure, after a few that are not.
    timeline: gives sojax's newest steps.

  Returns:
    Seconds of each contender, and seconds of sojax's lanes in the same rounds.
  """
  order = random.Random(0)
  measured: Samples = {name: [] for name in contenders}
  lanes: Samples = {"gradients": [], "transfer": [], "update": []}
  for number in range(-_WARM_UP_ROUNDS, num_rounds):
    names = order.sample(list(contenders), len(contenders))
    for name in names:
      start_s = time.perf_counter()
      contenders[name]()
      seconds = time.perf_counter() - start_s
      if number >= 0:
        measured[name].append(seconds)
    if number >= 0:
      for row, seconds in lane_seconds(timeline()).items():
        lanes[row].append(seconds)
  return measured, lanes


def lane_seconds(timeline: Timeline) -> dict[str, float]:
  """Returns what the newest step's lanes were busy for, by row."""
  last = max(span.step for span in timeline.spans)
  newest = timeline.steps(last, last)
  device = [
    span
    for span in newest.spans
    if span.name.startswith(("forward", "backward"))
  ]
  return {
    "gradients": Timeline(device).busy_s("device"),
    "transfer": newest.busy_s("d2h") + newest.busy_s("h2d"),
    "update": newest.busy_s("host"),
  }


def summarise(measured: Samples, lanes: Samples) -> dict[str, Any]:
  """Returns the medians, and the medians of the ratios of each round."""
  plain = ("one_jit", "two_jits")
  faster = min(plain, key=lambda name: statistics.median(measured[name]))
  rows: dict[str, dict[str, float]] = {}
  for row, seconds in lanes.items():
    rows[row] = {"sojax_s": statistics.median(seconds)}
    if row in measured:
      rows[row]["plain_s"] = statistics.median(measured[row])
      rows[row]["ratio_median"] = _ratios(seconds, measured[row])[1]
  if "sojax_callback" in measured:
    ours, theirs = measured["sojax_callback"], measured["sojax"]
    rows["callback"] = {
      "sojax_s": statistics.median(ours),
      "dma_s": statistics.median(theirs),
      "ratio_median": _ratios(ours, theirs)[1],
    }
  low, middle, high = _ratios(measured["sojax"], measured[faster])
  return {
    "ratio_median": middle,
    "ratio_quartiles": [low, high],
    "faster": faster,
    "step_s": {
      name: statistics.median(measured[name]) for name in ("sojax", *plain)
    },
    "rows": rows,
    "rounds": len(measured["sojax"]),
  }


def _ratios(ours: list[float], theirs: list[float]) -> list[float]:
  """Returns the quartiles of the ratios, pair by pair."""
  return np.quantile(np.divide(ours, theirs), [0.25, 0.5, 0.75]).tolist()


if __name__ == "__main__":
  flags.mark_flag_as_required("json")
  app.run(main)
