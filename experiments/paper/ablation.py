"""The paper's ablation: predicted from sourced constants, and fitted."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.paper import published, systems
from experiments.paper.constants import Constants
from experiments.paper.predict import predict
from sojax.plan.config import TrainConfig
from sojax.plan.workload import Workload

FITTED = ("efficiency", "group_elems")
"""What is fitted to the gains: the device's rate, and the size of a bucket,
which makes the tail after backward."""

FITTED_MORE = (*FITTED, "deepspeed_s_per_param")
"""The same and the seconds of DeepSpeed's Adam."""

_STEPS = (1.4, 1.15, 1.05, 1.02)


def gains(
  constants: Constants, workload: Workload, config: TrainConfig
) -> tuple[list[float], list[float]]:
  """Returns seconds of each row of the ablation, and the gain of each step."""
  machine = constants.machine(1)
  seconds = []
  for system in systems.ablation(constants):
    prediction = predict(system, workload, config, machine)
    assert prediction is not None, system.name
    seconds.append(prediction.step_s)
  return seconds, [
    before / after - 1
    for before, after in zip(seconds, seconds[1:], strict=False)
  ]


def fit(
  start: Constants,
  names: Sequence[str],
  workload: Workload,
  config: TrainConfig,
) -> Constants:
  """Returns the constants whose gains come closest to the paper's.

  The largest relative error of a gain is made small, one constant at a time.

  Args:
    start: where the search begins.
    names: the constants that may change.
    workload: the model of the ablation.
    config: what is trained.
  """
  wanted = [*published.ABLATION.values()]

  def error(constants: Constants) -> float:
    _, found = gains(constants, workload, config)
    return max(abs(x / y - 1) for x, y in zip(found, wanted, strict=True))

  return coordinate_search(error, start, names, _STEPS)


def coordinate_search(
  error: Callable[[Any], float],
  start: Any,
  names: Sequence[str],
  factors: Sequence[float],
) -> Any:
  """Lowers an error by factors of one attribute at a time.

  Args:
    error: of a value of a dataclass.
    start: where the search begins.
    names: attributes that may change.
    factors: by which they change, the large ones first.

  Returns:
    A value of which no single change by the last factor is better.

  >>> point = dataclasses.make_dataclass("Point", ["x", "y"])
  >>> found = coordinate_search(
  ...   lambda p: abs(p.x - 3) + abs(p.y - 5), point(1.0, 1.0), ["x", "y"],
  ...   (2.0, 1.1, 1.01))
  >>> round(found.x, 1), round(found.y, 1)
  (3.0, 5.0)
  """
  best, least = start, error(start)
  for factor in factors:
    improved = True
    while improved:
      improved = False
      for name in names:
        for change in (factor, 1 / factor):
          value = getattr(best, name) * change
          candidate = dataclasses.replace(best, **{name: value})
          found = error(candidate)
          if found < least:
            best, least, improved = candidate, found, True
  return best


def ablation_rows(
  predicted: Sequence[float], fitted: Sequence[float], more: Sequence[float]
) -> list[Mapping[str, Any]]:
  """Returns a row for each of the paper's gains.

  Args:
    predicted: gains with the constants that have sources.
    fitted: with those of `FITTED` fitted.
    more: with those of `FITTED_MORE`.
  """
  return [
    {
      "name": name,
      "paper_gain": gain,
      "predicted_gain": ours,
      "fitted_gain": best,
      "predicted_error_points": 100 * (ours - gain),
      "fitted_error_share": best / gain - 1,
      "fitted_more_gain": last,
    }
    for (name, gain), ours, best, last in zip(
      published.ABLATION.items(), predicted, fitted, more, strict=True
    )
  ]
