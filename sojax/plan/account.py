"""The byte account of a plan: what it takes on the host and on the device."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

from sojax.plan.buckets import Bucket, Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import DTYPE_BYTES, Plan, WireDtypes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
  """Bytes by purpose.

  Attributes:
    host: host memory: "masters", "moments", "working_copy" (weight-flow),
      "ring" (pinned, weight-stationary) and "gradients" (pinned, at most).
    device: device memory: "weights" (in weight-flow those of the window),
      "device_buckets" (masters and moments), "gradients" (at most, on their
      way out), "partial_sums" (accumulation) and "stage_inputs". Temporaries
      inside programs are not in it.
  """

  host: dict[str, int]
  device: dict[str, int]

  @property
  def host_bytes(self) -> int:
    """All host bytes."""
    return sum(self.host.values())

  @property
  def device_bytes(self) -> int:
    """All device bytes."""
    return sum(self.device.values())

  def table(self) -> str:
    """Returns the account as text, in MiB."""
    rows = [
      (f"{space} {name}", nbytes)
      for space, part in (("host", self.host), ("device", self.device))
      for name, nbytes in part.items()
    ]
    return "\n".join(f"{name:26}{n / 2**20:12.1f} MiB" for name, n in rows)


def ring_counts(layout: Layout, plan: Plan) -> dict[tuple[int, ...], int]:
  """Returns how many pinned buffers of each shape weights go through.

  Enough for `plan.ring_slots` buckets at once, and never more than there are
  units. Weight-flow needs none.
  """
  total: collections.Counter[tuple[int, ...]] = collections.Counter()
  most: collections.Counter[tuple[int, ...]] = collections.Counter()
  if plan.weights == "flow":
    return {}
  for bucket in _trained_on_host(layout):
    count = collections.Counter(unit.shape for unit in bucket.units)
    total += count
    most |= count
  return {
    shape: min(total[shape], plan.ring_slots * most[shape]) for shape in total
  }


def make_account(
  layout: Layout,
  plan: Plan,
  config: TrainConfig,
  stage_input_bytes: Sequence[int],
) -> Account:
  """Adds up what a plan takes.

  Args:
    layout: the model cut into buckets.
    plan: how a step is carried out.
    config: what is trained.
    stage_input_bytes: bytes of each stage's input for one micro-batch.

  Returns:
    The account.
  """
  wire = WireDtypes.of(plan, config)
  on_host = [b for b in layout.buckets if not b.on_device]
  on_device = [b for b in layout.buckets if b.on_device]
  trained = [b for b in layout.buckets if b.trained]
  flow = plan.weights == "flow"
  ring_elems = sum(
    math.prod(shape) * count
    for shape, count in ring_counts(layout, plan).items()
  )
  host = {
    "masters": 4 * _elems(on_host),
    "moments": 8 * _elems(_trained_on_host(layout)),
    "working_copy": wire.weight_bytes * _elems(on_host) if flow else 0,
    "ring": wire.weight_bytes * ring_elems,
    "gradients": wire.grad_bytes * _elems(_trained_on_host(layout)),
  }
  working = DTYPE_BYTES[config.working_dtype]
  window = plan.flow_window if flow else layout.model.num_stages
  device = {
    "weights": working * _largest_window(layout, window),
    "device_buckets": 12 * _elems(on_device),
    "gradients": wire.grad_bytes * _elems(trained),
    "partial_sums": 4 * _elems(trained) if config.accumulation > 1 else 0,
    "stage_inputs": sum(stage_input_bytes),
  }
  return Account(host=host, device=device)


def _trained_on_host(layout: Layout) -> list[Bucket]:
  return [b for b in layout.buckets if b.trained and not b.on_device]


def _elems(buckets: Iterable[Bucket]) -> int:
  return sum(bucket.size for bucket in buckets)


def _largest_window(layout: Layout, window: int) -> int:
  """Elements of the buckets that so many consecutive stages use, at most."""
  num_stages = layout.model.num_stages
  elems = [
    _elems(
      {
        b
        for s in range(first, min(first + window, num_stages))
        for b in layout.used_by(s)
      }
    )
    for first in range(max(1, num_stages - window + 1))
  ]
  return max(elems)
