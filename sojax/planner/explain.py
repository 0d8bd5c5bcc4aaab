"""Says in tables why a plan was chosen."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from sojax.graph.graph import TaskKind
from sojax.plan.pinned import (
  DEFAULT_PINNED_LIMIT_BYTES,
  PINNED_LIMIT,
  needed_limit_gb,
)
from sojax.plan.plan import Plan
from sojax.planner.evaluate import Candidate, Evaluator
from sojax.planner.search import Ranking

# What a step is without a technique.
_WITHOUT: Mapping[str, Mapping[str, Any]] = {
  "speculation": {"speculation": "wait"},
  "device_buckets": {"device_buckets": 0},
  "weights": {"weights": "stationary"},
  "master": {"master": "fp32"},
  "activations": {"activations": "recompute"},
  "park": {"park": "host"},
  "grad_cast": {"grad_cast": "host"},
  "weight_cast": {"weight_cast": "host"},
  "accumulate": {"accumulate": "device"},
  "grad_window": {"grad_window": None},
}


@dataclasses.dataclass(frozen=True)
class Contribution:
  """What a step takes without one technique of the plan.

  Attributes:
    name: the technique's switch.
    value: as it is in the plan.
    without: the plan that does without it; None if there is no such plan, as
      another technique needs this one.
  """

  name: str
  value: Any
  without: Candidate | None


def contributions(best: Candidate) -> tuple[Contribution, ...]:
  """Returns the techniques of a plan, and what it would be without each."""
  evaluate = Evaluator(best.problem)
  found = []
  for name, change in _WITHOUT.items():
    value = getattr(best.plan, name)
    if value == change[name] or name in best.problem.forced:
      continue
    try:
      without = evaluate(dataclasses.replace(best.plan, **change))
    except ValueError:
      without = None
    found.append(Contribution(name, value, without))
  return tuple(found)


def explain(ranking: Ranking) -> str:
  """Returns tables for people: the winner, what it owes to what, the memory."""
  best = ranking.best
  parts = [
    _heading(best),
    _techniques(best),
    _runner_up(ranking),
    _lanes(best),
    _slow_host(best),
    _memory(best),
    _environment(best),
  ]
  return "\n\n".join(part for part in parts if part)


def switches(plan: Plan) -> dict[str, Any]:
  """Returns what a plan has otherwise than the default one."""
  return differences(Plan(), plan)


def differences(before: Plan, after: Plan) -> dict[str, Any]:
  """Returns the switches of a plan that another one has otherwise."""
  return {
    field.name: getattr(after, field.name)
    for field in dataclasses.fields(Plan)
    if getattr(after, field.name) != getattr(before, field.name)
  }


def _heading(best: Candidate) -> str:
  problem = best.problem
  num_params = sum(leaf.size for leaf in problem.workload.model.leaves)
  config = problem.config
  tokens = config.micro_batch * config.seq_len * config.accumulation
  ranks = problem.workload.num_ranks
  return "\n".join(
    (
      f"{num_params / 1e9:.2f}e9 parameters, {ranks} x {problem.profile.name},"
      f" {tokens} tokens a step on each",
      f"plan: {_words(switches(best.plan)) or 'the default'}",
      f"step: {best.step_s:.4f} s, {ranks * tokens / best.step_s:.0f} tokens/s;"
      f" limited by: {best.limit}",
    )
  )


def _techniques(best: Candidate) -> str:
  lines = []
  for item in contributions(best):
    if item.without is None:
      effect = "needed by another technique"
    elif not item.without.fits:
      effect = "; ".join(map(str, item.without.shortages))
    else:
      gain = 100 * (item.without.step_s / best.step_s - 1)
      effect = f"{item.without.step_s:.4f} s, {gain:+.1f} %"
    lines.append(f"{f'{item.name}={_word(item.value)}':<28} {effect}")
  if not lines:
    return ""
  return "\n".join([f"{'technique':<28} a step without it", *lines])


def _runner_up(ranking: Ranking) -> str:
  """The next plan that takes longer: others take as long, to the digit."""
  best = ranking.best
  for other in ranking.others:
    if other.step_s > best.step_s:
      changed = _words(differences(best.plan, other.plan))
      slower = 100 * (other.step_s / best.step_s - 1)
      return (
        f"runner-up: {changed}: {other.step_s:.4f} s, {slower:+.1f} %;"
        f" {len(ranking.others)} other plans were simulated"
      )
  return ""


def _lanes(best: Candidate) -> str:
  return f"{best.simulation.steady().table()}\n\n{best.path.table()}"


def _slow_host(best: Candidate) -> str:
  """Says so if backward is too short to hide what the host does."""
  backward_s = best.seconds_of(TaskKind.BACKWARD)
  host_s = best.seconds_of(TaskKind.HOST_UPDATE, TaskKind.HOST_ACCUMULATE)
  if host_s <= backward_s:
    return ""
  steady = best.simulation.steady()
  exposed_s = steady.exposed_host_s() * best.step_s / steady.window_s()
  return (
    f"the host is slower than backward: its work on gradients takes"
    f" {host_s:.4f} s a step, backward {backward_s:.4f} s; while the host works"
    f" the device waits for {exposed_s:.4f} s"
  )


def _memory(best: Candidate) -> str:
  lines = [f"{'memory':<26} {'GiB':>9}"]
  for space, part in best.memory().items():
    lines += [
      f"{space} {name:<{25 - len(space)}} {size / 2**30:>9.2f}"
      for name, size in part.items()
      if size
    ]
    total = sum(part.values()) / 2**30
    available = best.problem.available_bytes[space] / 2**30
    lines.append(f"{space} in all {total:.2f} GiB of {available:.2f} GiB")
  return "\n".join(lines)


def environment(best: Candidate) -> dict[str, str]:
  """Returns what the environment has to say before a plan can be trained.

  That is on a GPU, all ranks in one process.
  """
  if best.problem.profile.device_is_host:
    return {}
  needed = needed_limit_gb(best.account)
  return {} if needed is None else {PINNED_LIMIT: str(needed)}


def _environment(best: Candidate) -> str:
  """Asks for what must be set before training."""
  pinned = f"{best.account.pinned_bytes / 2**30:.1f} GiB"
  return "\n".join(
    f"set {name}={value} in the environment before Python starts: {pinned} are"
    f" pinned, and JAX pins {DEFAULT_PINNED_LIMIT_BYTES >> 30} GiB unless told"
    " otherwise"
    for name, value in environment(best).items()
  )


def _words(changed: Mapping[str, Any]) -> str:
  return ", ".join(f"{name}={_word(x)}" for name, x in changed.items())


def _word(value: Any) -> str:
  """Writes equal values in a row, of one stage after the other, once."""
  if not isinstance(value, tuple):
    return str(value)
  runs = [(x, len([*run])) for x, run in itertools.groupby(value)]
  return "(" + ", ".join(f"{count} x {x}" for x, count in runs) + ")"
