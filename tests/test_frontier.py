"""The largest models that fit, by preset, machine and way to train."""

import dataclasses

import pytest

import sojax
from sojax.models import presets
from sojax.plan.machines import machine
from sojax.planner.problem import Problem
from sojax.planner.search import fits
from sojax.programs.workload import gpt_workload

AHEAD = {"speculation": "record2", "max_record_bytes": None}
WAITING = {"speculation": "wait", "park": "host"}
PARKED = {"speculation": "wait", "park": "device"}


def problem(num_layers, hidden_dim, num_ranks, forced):
  config = sojax.TrainConfig(
    micro_batch=1, seq_len=2048, precision="bf16", clip_norm=1.0
  )
  model = dataclasses.replace(
    presets.gpt("25b"),
    num_layers=num_layers,
    hidden_dim=hidden_dim,
    num_heads=hidden_dim // 128,
    max_seq_len=2048,
  )
  workload = gpt_workload(model, config, sojax.adamw(1e-4), num_ranks)
  return Problem(
    workload=workload, config=config, profile=machine("gh200"), forced=forced
  )


@pytest.mark.parametrize(
  ("num_layers", "hidden_dim", "billions", "num_ranks", "mode"),
  [
    (30, 8192, 24.5, 1, AHEAD),
    (34, 8192, 27.7, 1, AHEAD),
    (39, 8192, 31.8, 1, WAITING),
    (43, 8192, 35.0, 1, PARKED),
    (60, 8192, 48.7, 4, AHEAD),
    (62, 16384, 200.5, 16, AHEAD),
  ],
)
def test_it_fits_superchips(num_layers, hidden_dim, billions, num_ranks, mode):
  of = problem(num_layers, hidden_dim, num_ranks, mode)
  num_params = sum(leaf.size for leaf in of.workload.model.leaves)
  assert num_params >= billions * 1e9
  assert fits(of)
