"""The plans of an ablation: every technique off in turn, and on in turn."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from sojax.plan.plan import MIB, Plan

Switches = dict[str, Any]
"""Switches of a plan."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Technique:
  """What makes a step faster, as switches of a plan.

  Attributes:
    name: what it is called.
    on: the switches that turn it on.
    off: those that turn it off: the first that go with the plan's others.
  """

  name: str
  on: Switches
  off: tuple[Switches, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
  """A row of the ablation.

  Attributes:
    name: "all", "none", "all but X", "none but X", or "all, with X".
    plan: the plan.
  """

  name: str
  plan: Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """What depends on the model and the machine.

  Attributes:
    device_buckets: how many small buckets live on the device, if any do.
    large_device_buckets: how many large ones.
    bucket_bytes: of a small bucket.
    large_bucket_bytes: of a large one.
    few_threads: of the pool, where it does not have all.
  """

  device_buckets: int
  large_device_buckets: int
  bucket_bytes: int = 64 * MIB
  large_bucket_bytes: int = 1152 * MIB
  """6e8 parameters in bfloat16: the buckets of the published artifact."""
  few_threads: int


_APART: Switches = {
  "grad_cast": "host_separate",
  "weight_cast": "host_separate",
}
_ON_DEVICE: Switches = {"grad_cast": "device", "weight_cast": "device"}
_AHEAD: Switches = {"speculation": "record3", "speculate": "always"}

ALTERNATIVES: dict[str, Switches] = {
  "records of 2 bytes": {"speculation": "record2"},
  "copies": {"speculation": "pingpong"},
  "split masters": {"master": "split"},
  "gradients by callback": {"gradients_out": "callback"},
  "sums on the host": {"accumulate": "host"},
  "parked gradients": {"park": "device", "speculation": "wait"},
  "flowing weights": {"weights": "flow", "device_buckets": 0},
  "kept activations": {"activations": "keep"},
  "offloaded activations": {"activations": "offload"},
}
"""Other switches of the plan with everything on; most save memory for time."""


def techniques(sizes: Sizes) -> tuple[Technique, ...]:
  """Returns the techniques, in the order of the rows."""
  return (
    Technique(name="speculation", on=_AHEAD, off=({"speculation": "wait"},)),
    # Casts of their own go with no update that runs ahead.
    Technique(
      name="casts",
      on={"grad_cast": "host", "weight_cast": "host"},
      off=(_APART, _ON_DEVICE),
    ),
    Technique(
      name="device buckets",
      on={"device_buckets": sizes.device_buckets},
      off=({"device_buckets": 0},),
    ),
    Technique(
      name="small buckets",
      on={"bucket_bytes": sizes.bucket_bytes},
      off=({"bucket_bytes": sizes.large_bucket_bytes},),
    ),
  )


def variants(sizes: Sizes) -> Iterator[Variant]:
  """Yields the rows."""
  known = techniques(sizes)
  yield _variant("all", known, known, sizes)
  for left_out in known:
    some = [x for x in known if x is not left_out]
    yield _variant(f"all but {left_out.name}", some, known, sizes)
  few_threads = {"few threads": {"pool_threads": sizes.few_threads}}
  for name, switches in (ALTERNATIVES | few_threads).items():
    yield _variant(f"all, with {name}", known, known, sizes, switches)
  yield _variant("none", (), known, sizes)
  for only in known:
    yield _variant(f"none but {only.name}", [only], known, sizes)


def _variant(
  name: str,
  on: Sequence[Technique],
  known: Sequence[Technique],
  sizes: Sizes,
  changes: Switches | None = None,
) -> Variant:
  switches: Switches = {}
  for technique in on:
    switches |= technique.on
  switches |= changes or {}
  for technique in known:
    if technique not in on:
      switches |= next(x for x in technique.off if _accepts(switches | x))
  if switches["device_buckets"] and switches["bucket_bytes"] != (
    sizes.bucket_bytes
  ):
    switches["device_buckets"] = sizes.large_device_buckets
  return Variant(name=name, plan=Plan(**switches))


def _accepts(switches: Switches) -> bool:
  try:
    Plan(**switches)
  except ValueError:
    return False
  return True
