"""What is to be planned: a model, a batch, a machine, and what is given."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from sojax.plan.account import Account, make_account
from sojax.plan.buckets import Layout
from sojax.plan.config import TrainConfig
from sojax.plan.costs import StageSeconds
from sojax.plan.hardware import HardwareProfile
from sojax.plan.plan import Plan, WireDtypes
from sojax.plan.workload import Workload

_RESERVED = 0.05
"""Of each memory: what the operating system, or the device's runtime, takes."""


@dataclasses.dataclass(frozen=True)
class Shortage:
  """A memory that a plan does not fit in.

  Attributes:
    space: "host" or "device".
    needed_bytes: what the plan takes.
    available_bytes: what there is.
  """

  space: str
  needed_bytes: int
  available_bytes: int

  def __str__(self) -> str:
    return (
      f"{self.space} memory: {self.needed_bytes / 2**30:.1f} GiB needed,"
      f" {self.available_bytes / 2**30:.1f} GiB available,"
      f" {(self.needed_bytes - self.available_bytes) / 2**30:.1f} GiB short"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """A model and a batch on a machine.

  Attributes:
    workload: what the model asks of the machine.
    config: what is trained.
    profile: what one device and its share of the host can do.
    forced: switches of the plan that are given, by name.
    stage_seconds: what stages were measured to take, by what is done with their
      activations; else it follows from the profile.
  """

  workload: Workload
  config: TrainConfig
  profile: HardwareProfile
  forced: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  stage_seconds: Mapping[str, StageSeconds] = dataclasses.field(
    default_factory=dict
  )

  def plan(self, switches: Mapping[str, Any]) -> Plan:
    """Returns the plan of some switches, those that are given ahead of them.

    Raises:
      ValueError: see `Plan`.
    """
    return Plan.of({**switches, **self.forced})

  def layout(self, plan: Plan) -> Layout:
    """Returns the model cut into the buckets of a plan; each cut is kept.

    Raises:
      ValueError: see `plan_buckets`.
    """
    wire_bytes = WireDtypes.of(plan, self.config).grad_bytes
    on_device = plan.device_buckets, plan.host_ratio
    key = plan.bucket_bytes, wire_bytes, on_device
    if key not in self._layouts:
      self._layouts[key] = self.workload.layout(plan, self.config)
    return self._layouts[key]

  @functools.cached_property
  def _layouts(self) -> dict[Any, Layout]:
    return {}

  def account(self, layout: Layout, plan: Plan) -> Account:
    """Adds up what a plan takes of each memory."""
    policies = plan.activations_by_stage(self.workload.model.num_stages)
    kept_bytes = {
      stage: work.kept_bytes
      for stage, (work, policy) in enumerate(
        zip(self.workload.stages, policies, strict=True)
      )
      if policy == "keep"
    }
    return make_account(
      layout,
      plan,
      self.config,
      self.workload.input_bytes,
      kept_bytes,
      self.workload.needs,
    )

  @property
  def available_bytes(self) -> dict[str, int]:
    """Bytes that a plan may take of each memory."""
    return {
      "host": int((1 - _RESERVED) * self.profile.host_bytes),
      "device": int((1 - _RESERVED) * self.profile.device_bytes),
    }

  def memory(self, account: Account) -> dict[str, dict[str, int]]:
    """Returns what one rank takes of each memory, by purpose.

    The account has the shards of all ranks on the host, the profile is one
    rank's share of it. Temporaries of programs are no part of the account.
    """
    ranks = self.workload.num_ranks
    return {
      "host": {name: size // ranks for name, size in account.host.items()},
      "device": {**account.device, "temporaries": self.workload.temp_bytes},
    }

  def shortages(self, account: Account) -> tuple[Shortage, ...]:
    """Returns the memories that are too small."""
    available = self.available_bytes
    needed = {
      space: sum(part.values()) for space, part in self.memory(account).items()
    }
    if self.profile.device_is_host:
      needed["host"] += needed["device"]
    return tuple(
      Shortage(space, needed[space], available[space])
      for space in needed
      if needed[space] > available[space]
    )
