"""The space of all plans, and which of them have the same bits."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from hypothesis import strategies as st

import sojax
from sojax.plan.config import LossScale
from sojax.plan.plan import ACTIVATIONS, WEIGHTS, Plan, WireDtypes
from sojax.plan.residency import Residency
from tests.layered import Whole
from tests.speculating import spiking_loss
from tests.training import config, mesh_of, optimizer, small_gpt

NUM_STAGES = 4
"""Stages of the small GPT."""

BUCKET_BYTES = 1 << 16
"""Of a bucket by default, so that there are ten or more of them."""

_CORES = tuple(sorted(os.sched_getaffinity(0)))
_MANY = 1 << 40

VALUES: Mapping[str, st.SearchStrategy] = {
  "weights": st.one_of(
    st.sampled_from(WEIGHTS),
    st.tuples(*[st.sampled_from(WEIGHTS)] * NUM_STAGES),
  ),
  "bucket_bytes": st.sampled_from([BUCKET_BYTES, 100_001, 1 << 18, _MANY]),
  "device_buckets": st.sampled_from([0, 1, 5]),
  "host_ratio": st.sampled_from([None, 1, 0.7, 0]),
  "grad_cast": st.sampled_from(["host", "device", "host_separate"]),
  "weight_cast": st.sampled_from(["host", "device", "host_separate"]),
  "flow_window": st.sampled_from([2, 3, _MANY]),
  "grad_window": st.sampled_from([None, 1, 2, _MANY]),
  "ring_slots": st.sampled_from([1, 2, _MANY]),
  "pool_threads": st.sampled_from([None, 1, 3]),
  "pool_cores": st.sampled_from([None, _CORES[:1]]),
  "gradients_out": st.sampled_from([None, "dma", "callback", "io_callback"]),
  "activations": st.one_of(
    st.sampled_from(ACTIVATIONS),
    st.tuples(*[st.sampled_from(ACTIVATIONS)] * NUM_STAGES),
  ),
  "accumulate": st.sampled_from(["device", "host"]),
  "speculation": st.sampled_from(["wait", "record2", "record3", "pingpong"]),
  "speculate": st.sampled_from(["adaptive", "always", "never"]),
  "max_record_bytes": st.sampled_from([None, 0, 300_000, _MANY]),
  "escape_bytes_per_param": st.sampled_from([0, 0.125, 0.5, 12]),
  "master": st.sampled_from(["fp32", "split"]),
  "park": st.sampled_from(["host", "device"]),
}
"""Values of each switch that some plan has."""

WRONG = st.sampled_from(
  [
    None,
    True,
    -1,
    0,
    1.5,
    float("nan"),
    "",
    "fast",
    (),
    ("flow",) * 3,
    ("keep", None, "recompute", 3),
    (0, 0),
    (10**30,),
    [],
    {},
    {"host"},
    b"host",
    object(),
    np.arange(2),
    np.int64(2),
    10**30,
    -(10**30),
  ]
)
"""Values that most switches do not have."""

MODELS = {
  "gpt": (small_gpt, nnx.Param),
  "one stage": (Whole, nnx.Param),
  "mostly frozen": (small_gpt, nnx.PathContains("mlp")),
}
"""How models are made, and what of them is trained."""


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is trained, on what.

  Attributes:
    precision: of the working weights.
    accumulation: micro-batches.
    num_ranks: devices.
    model: one of MODELS.
  """

  precision: str
  accumulation: int
  num_ranks: int
  model: str = "gpt"

  @property
  def rows(self) -> int:
    """Rows of a batch."""
    return 4 * self.accumulation

  def trainer(self, plan: Mapping[str, Any]):
    """Returns a trainer whose loss can spike."""
    make, trainable = MODELS[self.model]
    return sojax.Trainer(
      make(),
      optimizer(),
      config(
        precision=self.precision,
        accumulation=self.accumulation,
        micro_batch=4 // self.num_ranks,
        loss_scale=LossScale(initial=2.0**4),
      ),
      {"bucket_bytes": BUCKET_BYTES, **plan},
      mesh_of(self.num_ranks) if self.num_ranks > 1 else None,
      trainable,
      spiking_loss,
    )

  @functools.cached_property
  def _default(self):
    with self.trainer({}) as ours:
      return ours._setup

  def layout(self, plan: Plan):
    """Returns the buckets of a plan; refuses one that is not for this setting.

    Raises:
      ValueError: if it is refused.
    """
    if plan.gradients_out == "io_callback" and self.num_ranks > 1:
      raise ValueError("it is for one device")
    default = self._default
    layout = default.workload.layout(plan, default.config)
    Residency.of(layout, plan)
    return layout

  def plainest(self, switches: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plainest plan whose runs have the same bits, by design.md.

    Programs that keep activations have gradients of other bits. The host's sums
    of micro-batches are rounded otherwise, and so is their norm. Device updates
    agree with the host's within rounding only; and on several devices the norm
    depends on how buckets are cut.
    """
    plan = Plan.of({"bucket_bytes": BUCKET_BYTES, **switches})
    on_device = sum(b.on_device for b in self.layout(plan).buckets)
    plain: dict[str, Any] = {
      "activations": tuple(
        "keep" if policy == "keep" else "recompute"
        for policy in plan.activations_by_stage(NUM_STAGES)
      ),
      "accumulate": plan.accumulate,
      "device_buckets": on_device,
      "host_ratio": None,
    }
    if on_device or self.num_ranks > 1:
      wire = WireDtypes.of(plan, self._default.config)
      widened = self.precision != "fp32" and wire.grad == "float32"
      plain |= {
        "bucket_bytes": plan.bucket_bytes,
        "grad_cast": "device" if widened else "host",
      }
    return plain


@st.composite
def valid_plans(
  draw, setting: Setting, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Draws a value for each switch, but for those that do not go together.

  Args:
    draw: from hypothesis.
    setting: what the plan is for.
    given: switches that are not drawn.
  """
  switches: dict[str, Any] = dict(given or {})
  for name in draw(st.permutations(sorted(VALUES.keys() - switches.keys()))):
    more = switches | {name: draw(VALUES[name])}
    try:
      setting.layout(Plan.of({"bucket_bytes": BUCKET_BYTES, **more}))
    except ValueError:
      continue
    switches = more
  return switches


@st.composite
def any_switches(draw) -> dict[str, Any]:
  """Draws a few switches, that may not go together, or be wrong."""
  names = draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=8))
  switches = {name: draw(VALUES[name]) for name in sorted(names)}
  if draw(st.integers(0, 3)) == 0:
    switches[draw(st.sampled_from([*VALUES, "numa_node"]))] = draw(WRONG)
  return switches
