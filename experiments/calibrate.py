"""Measures this machine: what plans and simulations of it are made from.

Question:
  What do the first device, its links and the host reach, how large must a
  transfer be for that, and how long do a model's stages take?
Command:
  python -m experiments.calibrate --json=PATH [--picture=PATH] [--stages_of=25m]
Hardware:
  Any that jax runs on; nothing else should run.
Expected time:
  One minute, and half a minute for the stages of a small model.
Expected result:
  A profile for `HardwareProfile.load`, a table, and a picture of bandwidth over
  size with the knees: the smallest sizes with 90 % of the best bandwidth.
"""

from collections.abc import Sequence

from absl import app, flags
from flax import nnx

import sojax
from experiments import plots
from experiments.results import picture_path, write_result
from sojax import models
from sojax.calibrate import Effort, measure_profile, measure_stages
from sojax.plan.costs import StageSeconds
from sojax.plan.hardware import Curve, HardwareProfile
from sojax.plan.plan import Plan
from sojax.runtime.setup import make_setup

_NAME = flags.DEFINE_string("machine", "this machine", "What to call it.")
_STAGES_OF = flags.DEFINE_string(
  "stages_of", None, "Preset of a model whose stages are measured as well."
)
_ROWS = flags.DEFINE_integer("stage_rows", 1, "Rows of its micro-batch.", 1)
_TOKENS = flags.DEFINE_integer("stage_tokens", 256, "Tokens of a row.", 1)
_PRECISION = flags.DEFINE_enum(
  "stage_precision", "fp32", ["fp32", "bf16", "fp16"], "Its precision."
)

_LINKS = ("d2h", "h2d", "d2h_pageable", "h2d_pageable")


def main(argv: Sequence[str]) -> None:
  """Runs the experiment as the flags say."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]}")
  effort = Effort()
  profile = measure_profile(name=_NAME.value, effort=effort)
  write_result(profile.to_json())
  print("\n".join(table(profile)))
  path = picture_path()
  if path is not None:
    plots.save_bandwidth(profile, path)
  if _STAGES_OF.value is not None:
    print("\n".join(_stage_table(stage_seconds(_STAGES_OF.value, effort))))


def stage_seconds(preset: str, effort: Effort) -> StageSeconds:
  """Measures the stages of a model, of which the flags say more."""
  config = models.presets.gpt(preset)
  setup = make_setup(
    models.GPT(config, rngs=nnx.Rngs(0)),
    sojax.adamw(1e-4),
    sojax.TrainConfig(
      micro_batch=_ROWS.value,
      seq_len=_TOKENS.value,
      precision=_PRECISION.value,
    ),
    Plan(),
    None,
    nnx.Param,
    None,
  )
  return measure_stages(setup, effort=effort, vocab_size=config.vocab_size)


def table(profile: HardwareProfile) -> list[str]:
  """Returns the lines of a profile's tables, in Markdown."""
  lines = ["", "| matrices of | TFLOP/s, at best |", "| --- | --- |"]
  for dtype, flops in profile.device_flops.items():
    lines.append(f"| {dtype} | {flops / 1e12:.3g} |")
  lines += ["", "| FLOPs of a product | share of the best |", "| --- | --- |"]
  for flops, share in profile.efficiency.points:
    lines.append(f"| {flops:.2g} | {share:.2f} |")
  return [*lines, *_link_lines(profile), *_host_lines(profile), ""]


def _link_lines(profile: HardwareProfile) -> list[str]:
  curves: list[Curve] = [getattr(profile, name) for name in _LINKS]
  lines = ["", _row("GB/s of MiB", *_LINKS), _row(*["---"] * 5)]
  for size, _ in profile.d2h.points:
    rates = (f"{curve.at(size) / 1e9:.3g}" for curve in curves)
    lines.append(_row(f"{size / 2**20:.4g}", *rates))
  knees = (f"{curve.knee() / 2**20:.4g} MiB" for curve in curves)
  return [*lines, _row("knee", *knees)]


def _host_lines(profile: HardwareProfile) -> list[str]:
  threads = [cores for cores, _ in profile.host_rates["step"].points]
  counts = [f"{cores:.0f} threads" for cores in threads]
  lines = ["", _row("GB/s of the host", *counts)]
  lines.append(_row(*["---"] * (1 + len(counts))))
  for operation, curve in profile.host_rates.items():
    rates = (f"{curve.at(cores) / 1e9:.3g}" for cores in threads)
    lines.append(_row(operation, *rates))
  return [
    *lines,
    "",
    f"Device memory {profile.device_bandwidth / 1e9:.3g} GB/s, host memory"
    f" {profile.host_bandwidth / 1e9:.3g} GB/s, dispatch"
    f" {profile.dispatch_s * 1e6:.3g} us, the runtime's threads"
    f" {profile.host_task_s * 1e6:.3g} us for each task.",
  ]


def _stage_table(seconds: StageSeconds) -> list[str]:
  lines = ["| stage | forward, ms | backward, ms |", "| --- | --- | --- |"]
  for stage, (forward, backward) in enumerate(
    zip(seconds.forward, seconds.backward, strict=True)
  ):
    times = f"{forward * 1e3:.3g}", f"{backward * 1e3:.3g}"
    lines.append(_row(str(stage), *times))
  return lines


def _row(*cells: str) -> str:
  return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
  flags.mark_flag_as_required("json")
  app.run(main)
