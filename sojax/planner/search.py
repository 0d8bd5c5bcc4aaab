"""Finds the plan with the shortest step among those that fit.

A descent: from a few plans that differ in what bounds them, to the neighbour
whose step is simulated to be shortest, until none is shorter. A neighbour that
cannot have a shorter step than the best so far is not simulated: one whose
programs alone take longer, or another bound of it (`sojax.graph.bounds`).
"""

import dataclasses
from collections.abc import Iterable, Iterator

from sojax.plan.plan import Plan
from sojax.planner.evaluate import Candidate, Evaluator
from sojax.planner.moves import (
  neighbours,
  seeds,
  with_first_stages_on_device,
)
from sojax.planner.problem import Problem

# A step must be shorter by more than this to be better: rates are not known to
# more digits, and the plan with fewer techniques is found first.
_BETTER = 0.998


@dataclasses.dataclass(frozen=True)
class Ranking:
  """What a search has found.

  Attributes:
    best: the plan with the shortest step.
    others: the other plans that were simulated, the shortest step first.
  """

  best: Candidate
  others: tuple[Candidate, ...]


class DoesNotFit(ValueError):
  """No plan fits.

  Attributes:
    nearest: the one that is least short of memory.
  """

  def __init__(self, nearest: Candidate):
    self.nearest = nearest
    short = "; ".join(map(str, nearest.shortages))
    super().__init__(
      f"no plan fits this machine; the nearest, {nearest.plan}, is short of"
      f" {short}"
    )


def fits(problem: Problem) -> bool:
  """Says whether any plan fits, as `search` would find.

  Raises:
    ValueError: see `search`.
  """
  evaluate = Evaluator(problem)
  return any(candidate.fits for candidate in _first(evaluate, problem))


def search(problem: Problem) -> Ranking:
  """Finds the best plan.

  Args:
    problem: the model, the machine, and the switches that are given.

  Returns:
    The best plan and what it was compared with.

  Raises:
    DoesNotFit: if no plan fits.
    ValueError: if the switches that are given do not go together, or not with
      the model.
  """
  evaluate = Evaluator(problem)
  first = _first(evaluate, problem)
  fitting = [candidate for candidate in first if candidate.fits]
  if not fitting:
    raise DoesNotFit(min(first, key=_short_bytes))
  settled = [_settle(evaluate, start) for start in _starts(fitting)]
  best = min(settled, key=lambda x: x.step_s)
  others = [c for c in evaluate.simulated if c is not best]
  return Ranking(best, tuple(sorted(others, key=lambda c: c.step_s)))


def _first(evaluate: Evaluator, problem: Problem) -> list[Candidate]:
  """Returns what a search begins with.

  If nothing else fits, that is plans of which as many stages as fit are on the
  device as a whole, where the host would have no room for them.

  Raises:
    ValueError: if what is given is wrong.
  """
  given = evaluate(problem.plan({}))
  tried = [*_evaluated(evaluate, seeds(problem))]
  if any(candidate.fits for candidate in tried):
    return tried
  tried.append(given)
  if given.fits:
    return tried
  for seed in tuple(tried):
    if [short.space for short in seed.shortages] == ["host"]:
      tried += _filling_the_device(evaluate, seed)
  return tried


def _filling_the_device(
  evaluate: Evaluator, seed: Candidate
) -> Iterator[Candidate]:
  """Yields the plan with the most stages on the device, if there is any."""
  problem = seed.problem
  low, high = 0, problem.workload.model.num_stages + 1
  best = seed
  while high - low > 1:
    middle = (low + high) // 2
    try:
      plan = with_first_stages_on_device(problem, seed.plan, middle)
      found = evaluate(plan)
    except ValueError:  # it does not go with what is given
      high = middle
      continue
    if "device" in {short.space for short in found.shortages}:
      high = middle
    else:
      low, best = middle, found
  if best is not seed:
    yield best


def _starts(fitting: Iterable[Candidate]) -> Iterator[Candidate]:
  """Yields the best of each size of buckets."""
  by_size = {}
  for seed in sorted(fitting, key=lambda seed: -seed.step_s):
    by_size[seed.plan.bucket_bytes] = seed
  yield from by_size.values()


def _settle(evaluate: Evaluator, best: Candidate) -> Candidate:
  """Descends by all moves until none leads to a better plan."""
  start: Candidate | None = None
  while best is not start:
    start = best
    for fine in (False, True):
      best = _descend(evaluate, best, fine)
  return best


def _descend(evaluate: Evaluator, best: Candidate, fine: bool) -> Candidate:
  """Goes to the best neighbour until none is better."""
  better: Candidate | None = best
  while better is not None:
    best = better
    around = neighbours(best.problem, best.plan, fine=fine)
    better = _best_of(_evaluated(evaluate, around), best)
  return best


def _best_of(
  candidates: Iterable[Candidate], start: Candidate
) -> Candidate | None:
  """Returns the best of some if it is better than `start`, else None."""
  bound_s = _BETTER * start.step_s
  found = [c for c in candidates if c.fits and c.compute_s < bound_s]
  best = start
  for candidate in sorted(found, key=lambda c: c.bound_s):
    if candidate.bound_s >= _BETTER * best.step_s:
      break
    if candidate.step_s < _BETTER * best.step_s:
      best = candidate
  return None if best is start else best


def _evaluated(
  evaluate: Evaluator, plans: Iterable[Plan]
) -> Iterator[Candidate]:
  """Evaluates plans, but for those that do not go with the model."""
  for plan in plans:
    try:
      yield evaluate(plan)
    except ValueError:
      continue


def _short_bytes(candidate: Candidate) -> int:
  return sum(s.needed_bytes - s.available_bytes for s in candidate.shortages)
