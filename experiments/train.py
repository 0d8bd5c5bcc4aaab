"""Trains a GPT on bytes or tokens, its optimizer offloaded to the host.

Question:
  Does a model train on this machine, and how much of the host's work is
  hidden? It also is the example of how sojax is used: see `train`.
Command:
  make train
  python -m experiments.train --data=PATH --steps=1000
  python -m experiments.train --tokenizer=PATH/tokenizer.json
  python -m experiments.train --resume      (after Ctrl-C or a failure)
Hardware:
  Two CPU cores, or more.
Expected time:
  About two minutes.
Expected result:
  One line of JSON on stdout, in which validation_loss is below bigram_loss:
  the model knows more about the text than which byte follows which. Both are
  in nats per byte, whatever the tokens: the summed loss, over the number of
  bytes that the predicted tokens stand for. A tokenizer that drops case or
  accents, or has one token for all it does not know, is spared predicting
  them. initial_loss and final_loss are in nats per token, exposed_host_s is
  the mean per step of the time in which the device waited for the host, tflops
  counts no recomputation. With --plan=auto predicted_step_s is what was
  expected of measured_step_s, and stderr says which plan that is and why.

All else goes to stderr and into --out, where each run makes a numbered folder:
checkpoints/, timeline.json (open it in ui.perfetto.dev), timeline.png, and
tensorboard/. A checkpoint is written at the end and every ten minutes; the
newest two are kept.
"""

import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import app, flags, logging
from flax import nnx

import sojax
from experiments import bigram, encodings, flops, plots, sampling
from experiments.interrupt import Interrupt
from experiments.provenance import provenance
from experiments.reporting import Progress, Reporter
from sojax import data, models
from sojax.auto import step_seconds

flags.DEFINE_string(
  "data", None, "Text file, folder or .jsonl; else the standard library."
)
flags.DEFINE_string(
  "tokenizer", None, "JSON file of the tokenizers library; else bytes."
)
flags.DEFINE_string("out", "runs/train", "Folder of the runs.")
flags.DEFINE_string("preset", "bytes", "Name of the model's preset.")
flags.DEFINE_integer("steps", 600, "Steps of the whole run.", 1)
flags.DEFINE_integer("micro_batch", 8, "Rows of a batch.", 1)
flags.DEFINE_integer("seq_len", 128, "Tokens that are predicted in a row.", 1)
flags.DEFINE_float("learning_rate", 2e-3, "Peak learning rate.", 0.0)
flags.DEFINE_string("precision", "fp32", "fp32 or bf16.")
flags.DEFINE_string("plan", "{}", 'auto, or JSON: {"weights": "flow"}.')
flags.DEFINE_integer("seed", 0, "Chooses weights and batches.", 0)
flags.DEFINE_bool("resume", False, "Continue the newest run in --out.")
FLAGS = flags.FLAGS

_VALIDATION_TOKENS = 1 << 17
_SAMPLE_TOKENS = 200
_SAVE_EVERY_S = 600.0  # what a failure costs at most
_KEPT_CHECKPOINTS = 2
_SHOWN_STEPS = 3  # of the timeline's picture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What decides the result of a run, bit for bit."""

  preset: str
  """Name of the model's preset."""
  steps: int
  """Steps of the whole run, which the learning rate's schedule spans."""
  micro_batch: int
  """Rows of a batch."""
  seq_len: int
  """Tokens that are predicted in a row."""
  learning_rate: float
  """Peak learning rate."""
  precision: str
  """Precision of the working weights, "fp32" or "bf16"."""
  seed: int
  """Chooses weights and batches."""
  text_sha256: str
  """Digest of the training text."""
  tokenizer_sha256: str | None
  """Digest of the tokenizer's file; None for bytes."""
  vocab_size: int
  """Number of tokens, which takes the place of the preset's."""


def main(argv: Sequence[str]) -> None:
  """Runs the experiment as the flags say."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]}")
  logging.set_verbosity(logging.WARNING)  # Orbax logs every array it writes.
  corpus = data.load_corpus(FLAGS.data)
  encoding = encodings.load(FLAGS.tokenizer)
  settings = settings_from_flags(corpus, encoding)
  with make_trainer(settings, FLAGS.plan) as trainer:
    if trainer.auto is not None:
      print(trainer.auto.explain(), file=sys.stderr)
    folder = find_folder(Path(FLAGS.out), resume=FLAGS.resume)
    progress = Progress()
    if FLAGS.resume:
      progress = restore(trainer, settings, folder)
    result = run(trainer, settings, corpus, encoding, progress, folder)
  print(json.dumps(result | provenance(), allow_nan=False))


def settings_from_flags(
  corpus: data.Corpus, encoding: encodings.Encoding
) -> Settings:
  """Returns the settings that the flags, text and tokenizer make."""
  chosen: dict[str, Any] = {
    field.name: FLAGS[field.name].value
    for field in dataclasses.fields(Settings)
    if field.name in FLAGS
  }
  return Settings(
    text_sha256=hashlib.sha256(corpus.train).hexdigest(),
    tokenizer_sha256=encoding.sha256,
    vocab_size=encoding.vocab_size,
    **chosen,
  )


def find_folder(out: Path, *, resume: bool) -> Path:
  """Makes the folder of a new run, or finds that of the newest one.

  Raises:
    ValueError: if a run is to be resumed and none has a checkpoint.
  """
  runs = sorted(path for path in out.glob("[0-9]*") if path.is_dir())
  if not resume:
    number = int(runs[-1].name) + 1 if runs else 1
    folder = out / f"{number:04d}"
    folder.mkdir(parents=True)
    return folder
  for folder in reversed(runs):
    if (folder / "checkpoints").is_dir():
      return folder
  raise ValueError(
    f"--out={out} holds no run with a checkpoint; start one without --resume"
  )


def make_trainer(settings: Settings, plan: str) -> sojax.Trainer:
  """Returns a trainer of a new model.

  Args:
    settings: of the run.
    plan: "auto", or the plan's switches as a JSON object.
  """
  model = models.GPT(model_config(settings), rngs=nnx.Rngs(settings.seed))
  return sojax.Trainer(
    model,
    make_optimizer(settings),
    sojax.TrainConfig(
      micro_batch=settings.micro_batch,
      seq_len=settings.seq_len,
      precision=settings.precision,
      clip_norm=1.0,
    ),
    plan=json.loads(plan) if plan.startswith("{") else plan,
  )


def model_config(settings: Settings) -> models.GPTConfig:
  """Returns the preset, for the tokens and sequences of the batches."""
  return dataclasses.replace(
    models.presets.gpt(settings.preset),
    vocab_size=settings.vocab_size,
    max_seq_len=settings.seq_len,
  )


def make_optimizer(settings: Settings) -> sojax.AdamW:
  """Returns AdamW with warm-up and cosine decay; only matrices decay."""
  schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=settings.learning_rate,
    warmup_steps=min(50, settings.steps // 5),
    decay_steps=settings.steps,
    end_value=0.1 * settings.learning_rate,
  )
  return sojax.adamw(
    schedule,
    b2=0.95,
    weight_decay=0.1,
    mask=lambda params: jax.tree.map(lambda param: param.ndim > 1, params),
  )


def run(
  trainer: sojax.Trainer,
  settings: Settings,
  corpus: data.Corpus,
  encoding: encodings.Encoding,
  progress: Progress,
  folder: Path,
) -> dict[str, Any]:
  """Trains, saves, draws, validates and samples.

  Returns:
    The figures of the run; None for those that are not known, as the losses
    of the validation, which Ctrl-C leaves out.
  """
  tokens = encoding.encode(corpus.train)
  tokens_per_s = train(trainer, settings, tokens, progress, folder)
  checkpoint = save(trainer, settings, progress, folder)
  timeline = save_timeline(trainer, folder)
  step_figures = compare_step(trainer)
  interrupted = progress.steps < settings.steps
  losses = {"validation_loss": math.nan, "bigram_loss": math.nan}
  if not interrupted:
    losses = validate(trainer, settings, corpus, encoding)
    show_sample(trainer, settings, encoding)
  flops_per_token = flops.train_flops_per_token(
    model_config(settings), settings.seq_len
  )
  figures = {
    **dataclasses.asdict(progress),
    **losses,
    **step_figures,
    "tokens_per_s": tokens_per_s,
    "tflops": 1e-12 * tokens_per_s * flops_per_token,
    "exposed_host_s": progress.exposed_host_s / progress.steps,
    "checkpoint": str(checkpoint),
    "timeline": str(timeline),
    "interrupted": interrupted,
    "config": dataclasses.asdict(settings) | {"plan": FLAGS.plan},
  }
  # JSON has no NaN.
  return {k: None if v != v else v for k, v in figures.items()}


def train(
  trainer: sojax.Trainer,
  settings: Settings,
  tokens: np.ndarray,
  progress: Progress,
  folder: Path,
) -> float:
  """Trains to the last step, or until Ctrl-C, and keeps up the progress.

  Returns:
    The speed in tokens per second, NaN after fewer than two steps.
  """
  sampler = data.BatchSampler(
    tokens=tokens,
    num_rows=settings.micro_batch,
    seq_len=settings.seq_len,
    seed=settings.seed,
  )
  reporter = Reporter(
    progress,
    num_steps=settings.steps,
    tokens_per_step=settings.micro_batch * settings.seq_len,
    log_dir=folder / "tensorboard",
  )
  saved_s = time.monotonic()
  with reporter, Interrupt() as interrupt:
    for step in range(trainer.num_steps, settings.steps):
      reporter.add(trainer.step(sampler.batch(step)))
      if interrupt.requested:
        break
      if (now_s := time.monotonic()) - saved_s >= _SAVE_EVERY_S:
        reporter.flush()
        save(trainer, settings, progress, folder)
        saved_s = now_s
  return reporter.tokens_per_s


def save(
  trainer: sojax.Trainer, settings: Settings, progress: Progress, folder: Path
) -> Path:
  """Writes a checkpoint and returns its path."""
  user_state = {
    "settings": dataclasses.asdict(settings),
    "progress": dataclasses.asdict(progress),
  }
  return trainer.save(
    folder / "checkpoints", user_state, keep=_KEPT_CHECKPOINTS
  )


def restore(
  trainer: sojax.Trainer, settings: Settings, folder: Path
) -> Progress:
  """Restores the newest checkpoint and returns the progress up to it.

  Raises:
    ValueError: if it was written with other settings.
  """
  user_state = trainer.restore(folder / "checkpoints")
  for name, value in dataclasses.asdict(settings).items():
    before = user_state["settings"].get(name)
    if before != value:
      raise ValueError(
        f"{folder} was started with {name}={before}, not {value}; resume with "
        "the flags it was started with"
      )
  return Progress(**user_state["progress"])


def save_timeline(trainer: sojax.Trainer, folder: Path) -> Path:
  """Writes the newest steps' timeline, and a picture of the last few."""
  timeline = trainer.timeline()
  path = folder / "timeline.json"
  timeline.save(path)
  if timeline.spans:
    last = max(span.step for span in timeline.spans)
    shown = timeline.steps(last - _SHOWN_STEPS + 1, last)
    plots.save_timeline(shown, folder / "timeline.png")
  return path


def compare_step(trainer: sojax.Trainer) -> dict[str, float]:
  """Returns the seconds of a step as predicted for plan="auto", and measured.

  NaN is what is not known. Prints them, if there is a prediction.
  """
  measured_s = step_seconds(trainer.timeline())
  predicted_s = None
  if trainer.auto is not None:
    predicted_s = trainer.auto.step_s
    print(trainer.auto.report(trainer.timeline()), file=sys.stderr)
  return {
    name: math.nan if seconds is None else seconds
    for name, seconds in (
      ("predicted_step_s", predicted_s),
      ("measured_step_s", measured_s),
    )
  }


def validate(
  trainer: sojax.Trainer,
  settings: Settings,
  corpus: data.Corpus,
  encoding: encodings.Encoding,
) -> dict[str, float]:
  """Returns the losses of the model and of bigrams on the same bytes.

  Both are sums over the bytes that the predicted tokens stand for, divided by
  the number of these bytes.
  """
  shape = {"num_rows": settings.micro_batch, "seq_len": settings.seq_len}
  batch_tokens = settings.micro_batch * settings.seq_len
  batches = list(
    data.validation_batches(
      encoding.encode(corpus.validation),
      max_batches=-(-_VALIDATION_TOKENS // batch_tokens),
      **shape,
    )
  )
  losses = [trainer.evaluate(batch) for batch in batches]
  weights = [batch["loss_mask"].sum() for batch in batches]
  ends = encoding.ends(corpus.validation)
  # The first token is not predicted. Bigrams need a byte before the first.
  first, end = max(ends[0], 1), ends[int(sum(weights))]
  same_bytes = data.encode(corpus.validation[first - 1 : end])
  bigrams = bigram.fit(data.encode(corpus.train))
  return {
    "validation_loss": float(np.dot(losses, weights) / (end - first)),
    "bigram_loss": bigrams.loss(data.validation_batches(same_bytes, **shape)),
  }


def show_sample(
  trainer: sojax.Trainer, settings: Settings, encoding: encodings.Encoding
) -> None:
  """Prints text that the model writes at the beginning of a document."""
  tokens = sampling.sample(
    trainer.sync_model(),
    encoding.encode(data.SEPARATOR),
    num_tokens=_SAMPLE_TOKENS,
    window=settings.seq_len,
    temperature=0.8,
    seed=settings.seed,
  )
  text = encoding.decode(tokens).decode(errors="replace")
  shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
  print(f"{'-' * 80}\n{shown}\n{'-' * 80}", file=sys.stderr)


if __name__ == "__main__":
  app.run(main)
