"""Plans a model on this machine: `plan="auto"`.

What the machine does is measured once, and so are a model's stages; the figures
are kept in files, which only serve the machine that they were measured on.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sojax.calibrate import (
  Effort,
  measure_profile,
  measure_stages,
  this_machine,
)
from sojax.graph.graph import TaskKind
from sojax.graph.timeline import Timeline
from sojax.plan.costs import StageSeconds
from sojax.plan.hardware import HardwareProfile
from sojax.plan.plan import Plan
from sojax.planner.explain import explain
from sojax.planner.problem import Problem
from sojax.planner.search import Ranking, search
from sojax.runtime.setup import Setup

CACHE = Path.home() / ".cache" / "sojax"
"""Where measurements are kept."""

_METHOD = 2
"""Of measuring; another number has other files. Raise it with a change."""

_MEASURED = ("recompute", "keep")
"""Policies whose stages are measured; one that offloads recomputes."""


@dataclasses.dataclass(frozen=True)
class AutoPlan:
  """A plan that was chosen, and what was expected of it.

  Attributes:
    ranking: the plan and those that it was compared with.
  """

  ranking: Ranking

  @property
  def plan(self) -> Plan:
    """The plan."""
    return self.ranking.best.plan

  @property
  def step_s(self) -> float:
    """Seconds of a step, as simulated."""
    return self.ranking.best.step_s

  def explain(self) -> str:
    """Returns tables for people: why this plan."""
    return explain(self.ranking)

  def report(self, timeline: Timeline) -> str:
    """Returns a line with the predicted and the measured time of a step.

    Args:
      timeline: what the trainer recorded.
    """
    measured_s = step_seconds(timeline)
    if measured_s is None:
      return f"step: {self.step_s:.4f} s predicted; too few steps to measure"
    off = 100 * (self.step_s / measured_s - 1)
    return (
      f"step: {self.step_s:.4f} s predicted, {measured_s:.4f} s measured"
      f" ({off:+.1f} %)"
    )


def step_seconds(timeline: Timeline) -> float | None:
  """Returns the median time from one Validate to the next.

  Args:
    timeline: of several steps.

  Returns:
    Seconds; None if there are fewer than three steps, of which the first one
    does not count, since it compiled.
  """
  ends_s = sorted(
    (span.step, span.end_s)
    for span in timeline.spans
    if span.name == TaskKind.VALIDATE
  )[1:]
  times_s = [
    after_s - before_s
    for (_, before_s), (_, after_s) in itertools.pairwise(ends_s)
  ]
  return statistics.median(times_s) if times_s else None


def auto_plan(
  make: Callable[[Plan], Setup],
  *,
  effort: Effort | None = None,
  cache: Path = CACHE,
) -> AutoPlan:
  """Measures what is not known yet, and plans.

  The first time on a machine this takes about a minute; the first time with a
  model as long as its stages take to compile and to run a few times.

  Args:
    make: takes the model apart for a plan.
    effort: how long to measure; None for `Effort()`.
    cache: folder of the measurements.

  Returns:
    The plan.

  Raises:
    DoesNotFit: if no plan fits this machine.
    ValueError: whatever `make` raises.
  """
  setups = {policy: make(Plan(activations=policy)) for policy in _MEASURED}
  setup = setups["recompute"]
  profile = _share(_profile(effort, cache), setup.workload.num_ranks)
  stage_seconds = {
    policy: _stages(setups[policy], effort, cache) for policy in _MEASURED
  }
  stage_seconds["offload"] = stage_seconds["recompute"]
  problem = Problem(
    workload=setup.workload,
    config=setup.config,
    profile=profile,
    stage_seconds=stage_seconds,
  )
  return AutoPlan(search(problem))


def _profile(effort: Effort | None, cache: Path) -> HardwareProfile:
  path = cache / f"machine-{_digest(this_machine(), effort)}.json"
  if path.exists():
    profile = HardwareProfile.load(path)
    profile.check_measured_on(this_machine())
    return profile
  profile = measure_profile(effort=effort)
  cache.mkdir(parents=True, exist_ok=True)
  profile.save(path)
  return profile


def _share(profile: HardwareProfile, num_ranks: int) -> HardwareProfile:
  """Returns what one of several devices of this host has of it."""
  return dataclasses.replace(
    profile,
    host_bytes=profile.host_bytes // num_ranks,
    host_bandwidth=profile.host_bandwidth / num_ranks,
    host_cores=max(profile.host_cores // num_ranks, 1),
  )


def _stages(setup: Setup, effort: Effort | None, cache: Path) -> StageSeconds:
  model = [(leaf.name, leaf.shape) for leaf in setup.layout.model.leaves]
  work = setup.workload.stages, setup.workload.num_ranks
  name = _digest(
    this_machine(), effort, model, work, setup.config, setup.plan.activations
  )
  path = cache / f"stages-{name}.json"
  if path.exists():
    return _read_stages(path, setup.layout.model.num_stages)
  measured = measure_stages(setup, effort=effort)
  cache.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(dataclasses.asdict(measured)))
  return measured


def _read_stages(path: Path, num_stages: int) -> StageSeconds:
  """Reads a file of stages' seconds; raises ValueError if it is damaged."""
  try:
    values = json.loads(path.read_text())
    found = {name: tuple(values[name]) for name in ("forward", "backward")}
    whole = all(
      len(seconds) == num_stages and all(0 <= x < math.inf for x in seconds)
      for seconds in found.values()
    )
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(_damaged(path, num_stages)) from error
  if not whole:
    raise ValueError(_damaged(path, num_stages))
  return StageSeconds(**found)


def _damaged(path: Path, num_stages: int) -> str:
  return (
    f"{path} does not hold the seconds of {num_stages} stages, forward and"
    " backward; remove it, and they are measured again"
  )


def _digest(machine: Mapping[str, str], *what: Any) -> str:
  text = json.dumps([_METHOD, sorted(machine.items()), repr(what)])
  return hashlib.sha256(text.encode()).hexdigest()[:16]
