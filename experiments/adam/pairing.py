"""Times contenders in pairs with a base, and sums the pairs up."""

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# After a parallel region, the threads of OpenMP and of XLA spin for some
# milliseconds before they sleep, on the cores that the next contender needs.
_SETTLE_S = 0.02

Pairs = dict[str, list[tuple[float, float]]]
"""By contender: its seconds and those of the base beside it, round by round."""

State = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]
"""p, mu and nu, float32 [n], and the weights written, if any."""


def nothing() -> None:
  """Does nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
  """Something to be timed.

  Attributes:
    name: unique.
    run: what is timed; it waits for what it starts.
    before: what has to be done before each run, not timed.
    after: what has to be done after each run, not timed.
    state: gives the state that `run` changes, as it is now. Until the next run
      it may be a view.
    steps: whether `run` takes an AdamW step; otherwise `state` stays the same.
  """

  name: str
  run: Callable[[], None]
  state: Callable[[], State]
  before: Callable[[], None] = nothing
  after: Callable[[], None] = nothing
  steps: bool = True


def measure(
  base: Contender,
  others: Sequence[Contender],
  num_rounds: int,
  *,
  num_warm_up: int = 2,
  between_rounds: Callable[[], None] = nothing,
) -> Pairs:
  """Times each contender next to the base, once a round.

  The order of the contenders in a round is random, and so is who comes first
  in a pair.

  Args:
    base: what all are compared with.
    others: contenders.
    num_rounds: rounds that count.
    num_warm_up: rounds before these, which do not.
    between_rounds: called before each round, not timed.

  Returns:
    `num_rounds` pairs for each of the others.
  """
  rng = random.Random(0)
  pairs: Pairs = {other.name: [] for other in others}
  assert len(pairs) == len(others), "two contenders have the same name"
  for number in range(-num_warm_up, num_rounds):
    between_rounds()
    for other in rng.sample(list(others), len(others)):
      if rng.random() < 0.5:
        seconds = _time(other)
        base_seconds = _time(base)
      else:
        base_seconds = _time(base)
        seconds = _time(other)
      if number >= 0:
        pairs[other.name].append((seconds, base_seconds))
  return pairs


def ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
  """Returns the median of the pairs' ratios, and their quartiles.

  >>> ratio([(1.0, 2.0), (3.0, 2.0), (8.0, 2.0)])
  {'median': 1.5, 'quartiles': [1.0, 2.75]}
  """
  quotients = [seconds / base_seconds for seconds, base_seconds in pairs]
  low, middle, high = np.quantile(quotients, [0.25, 0.5, 0.75]).tolist()
  return {"median": middle, "quartiles": [low, high]}


def median_seconds(pairs: Mapping[str, Sequence[tuple[float, float]]]):
  """Returns the median seconds of each contender."""
  return {
    name: float(np.median([seconds for seconds, _ in values]))
    for name, values in pairs.items()
  }


def base_seconds(pairs: Mapping[str, Sequence[tuple[float, float]]]) -> float:
  """Returns the median seconds of the base over all pairs."""
  return float(np.median([base for p in pairs.values() for _, base in p]))


def base_deciles(
  pairs: Mapping[str, Sequence[tuple[float, float]]],
) -> list[float]:
  """Returns the nine deciles of the base's seconds over all pairs."""
  seconds = [base for p in pairs.values() for _, base in p]
  return np.quantile(seconds, np.arange(1, 10) / 10).tolist()


def fastest(pairs: Pairs, prefix: str) -> str:
  """Returns the name with the smallest median ratio.

  Picking it after the fact favours it a little: the luck of several medians
  is in it.

  Args:
    pairs: of at least one contender with the prefix.
    prefix: what the names to choose from begin with.
  """
  names = [name for name in pairs if name.startswith(prefix)]
  return min(names, key=lambda name: ratio(pairs[name])["median"])


def _time(contender: Contender) -> float:
  contender.before()
  time.sleep(_SETTLE_S)
  start_s = time.perf_counter()
  contender.run()
  seconds = time.perf_counter() - start_s
  contender.after()
  return seconds
