"""The switches that the planner turns, alone or with what goes with them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from sojax.plan.buckets import Bucket
from sojax.plan.hardware import Curve, HardwareProfile
from sojax.plan.plan import DTYPE_BYTES, MIN_BUCKET_BYTES, Plan
from sojax.plan.records import BYTES_PER_PARAM
from sojax.planner.problem import Problem

Switches = Mapping[str, Any]

_SIZES = tuple(MIN_BUCKET_BYTES << doublings for doublings in range(15))
"""Of transfers, in bytes: from 64 KiB to 1 GiB."""

_KNEE = 0.9
"""Share of its best rate that a link reaches at its knee."""

_DISPATCHES = 40
"""Times of dispatch in the longest transfer to try: it is 2.5 % of that."""

_FEW_BUCKETS = 128
"""Of these a step is simulated in less than 0.1 s: smaller ones cost little."""

_MOST_BUCKETS = 1024
"""Of so many a step takes 0.25 s to simulate, and as much to dispatch."""

_WAITS: Switches = {"speculation": "wait", "max_record_bytes": None}
_FRUGAL: Switches = {"weights": "flow", "master": "split", "grad_window": 2}
_PARKED: Switches = {
  **_WAITS,
  "park": "device",
  "accumulate": "device",
  "grad_window": None,
}

# From what is fast to what takes little memory.
_SEEDS: tuple[Switches, ...] = (
  {"speculation": "record2"},
  {"speculation": "record2", **_FRUGAL},
  {
    "speculation": "record2",
    **_FRUGAL,
    "activations": "offload",
    "escape_bytes_per_param": 0.125,
  },
  {**_FRUGAL, "activations": "offload"},
  {**_FRUGAL, **_PARKED, "activations": "offload"},
)

_ADDED_UP: tuple[Switches, ...] = (
  {**_FRUGAL, "accumulate": "host"},
  {**_FRUGAL, "accumulate": "host", "activations": "offload"},
)
"""Where the device has no room for the sums of micro-batches."""


def seeds(problem: Problem) -> Iterator[Plan]:
  """Yields the plans that a search begins with.

  Their buckets are large, so that steps have few tasks and are simulated
  quickly; and smaller where they are few, from where another plan may be the
  best.
  """
  for size in _first_sizes(problem):
    most = len(_trained_buckets(problem, Plan(bucket_bytes=size)))
    tried = [*_SEEDS, {"device_buckets": most}]
    if problem.config.accumulation > 1:
      tried += _ADDED_UP
    for switches in tried:
      try:
        yield problem.plan({"bucket_bytes": size, **switches})
      except ValueError:  # it does not go with what is given
        continue


def _first_sizes(problem: Problem) -> Iterator[int]:
  """Yields the largest size, and perhaps one of half or a quarter of it."""
  sizes = _bucket_bytes(problem)
  yield sizes[-1]
  for size in sizes[-3:-1]:
    if _wire_bytes(problem) <= _FEW_BUCKETS * size:
      yield size
      break


def with_first_stages_on_device(
  problem: Problem, plan: Plan, num_stages: int
) -> Plan:
  """Returns a plan that keeps all of the first stages on the device.

  Args:
    problem: what is given.
    plan: the plan; its other stages stay as they are.
    num_stages: how many stages have weights, masters and moments there.

  Raises:
    ValueError: if that does not go with the rest, or with what is given.
  """
  buckets = _trained_buckets(problem, plan)
  weights = plan.weights_by_stage(problem.workload.model.num_stages)
  switches = {
    "weights": ("stationary",) * num_stages + weights[num_stages:],
    "device_buckets": sum(bucket.stage < num_stages for bucket in buckets),
  }
  given = problem.forced.keys() & {*switches, "host_ratio"}
  if given:
    raise ValueError(f"{sorted(given)} are given")
  return dataclasses.replace(plan, **switches)


def neighbours(
  problem: Problem, plan: Plan, *, fine: bool = False
) -> Iterator[Plan]:
  """Yields the plans around one, what is given left as it is.

  Args:
    problem: what is given.
    plan: where to go from.
    fine: whether to try other sizes of buckets and how many of them are on the
      device, and only these; else all but the sizes.
  """
  moves = _fine_moves if fine else _moves
  for move in moves(problem, plan):
    if problem.forced.keys() & move.keys():
      continue
    try:
      changed = dataclasses.replace(plan, **move)
    except ValueError:  # it does not go with the rest
      continue
    if changed != plan:
      yield changed


def _moves(problem: Problem, plan: Plan) -> Iterator[Switches]:
  config = problem.config
  yield from _residencies(problem, plan)
  yield from _speculations(problem, plan)
  for policy in ("keep", "recompute", "offload"):
    yield {"activations": policy}
  yield from _device_buckets(problem, plan)
  for window in (None, 2, 3):
    yield {"grad_window": window}
  if config.precision == "bf16":
    yield {"master": "split", "weight_cast": "host"}
  yield {"master": "fp32"}
  if config.precision != "fp32":
    yield {"grad_cast": "host"}
    yield {"grad_cast": "device"}
    yield {"weight_cast": "host"}
    yield {"weight_cast": "device", "master": "fp32"}
  if config.accumulation > 1:
    yield {"accumulate": "host", "park": "host"}
    yield {"accumulate": "device"}
  yield _PARKED
  yield {"park": "host"}
  if plan.flows:
    for window in (2, 3, 4):
      yield {"flow_window": window}
  for threads in pool_threads(problem.profile):
    yield {"pool_threads": threads}


def _residencies(problem: Problem, plan: Plan) -> Iterator[Switches]:
  """One for all stages; or the first ones keep their weights on the device.

  Those are the stages that backward finishes last, where device buckets are.
  """
  buckets = _trained_buckets(problem, plan)
  yield {"weights": "stationary"}
  num_stages = problem.workload.model.num_stages
  for kind in ("flow", "flow_once"):
    yield {"weights": kind, **_at_most(plan, 0)}
    for staying in sorted({num_stages * part // 4 for part in (1, 2, 3)}):
      weights = ("stationary",) * staying + (kind,) * (num_stages - staying)
      most = sum(bucket.stage < staying for bucket in buckets)
      yield {"weights": weights, **_at_most(plan, most)}


def _at_most(plan: Plan, count: int) -> Switches:
  """Takes device buckets away if there are more."""
  return {"device_buckets": count} if plan.device_buckets > count else {}


def _fine_moves(problem: Problem, plan: Plan) -> Iterator[Switches]:
  yield from _resized(problem, plan)
  yield from _device_buckets(problem, plan)


def _resized(problem: Problem, plan: Plan) -> Iterator[Switches]:
  """As many bytes stay on the device with other sizes of buckets."""
  for size in _bucket_bytes(problem):
    count = round(plan.bucket_bytes / size * plan.device_buckets)
    yield {"bucket_bytes": size, "device_buckets": count}


def _device_buckets(problem: Problem, plan: Plan) -> Iterator[Switches]:
  """Eighths of all, and a few more or less than there are."""
  now, most = plan.device_buckets, len(_trained_buckets(problem, plan))
  counts = {most * part // 8 for part in range(9)} | {1, 2}
  counts |= {now + more for more in (-16, -4, -1, 1, 4, 16)}
  for count in sorted(counts & {*range(most + 1)}):
    entailed = {}
    if count and isinstance(plan.weights, str):
      entailed = {"weights": "stationary"}
    yield {"device_buckets": count, **entailed}


def _trained_buckets(problem: Problem, plan: Plan) -> list[Bucket]:
  """Returns the trained buckets of a plan, wherever their state lives."""
  alone = dataclasses.replace(plan, device_buckets=0)
  return [b for b in problem.layout(alone).buckets if b.trained]


def _speculations(problem: Problem, plan: Plan) -> Iterator[Switches]:
  """All buckets may run ahead, or some of them, those that come first.

  Where the host is the bottleneck it pays to do so only as long as backward
  runs: what comes after can go in the order that the next forward needs.
  """
  yield _WAITS
  elems = sum(leaf.size for leaf in problem.workload.model.leaves)
  escapes = plan.escape_bytes_per_param
  for scheme, record_bytes in BYTES_PER_PARAM.items():
    for part in (None, 0.125, 0.25, 0.5):
      most = part and int(part * elems * (record_bytes + escapes))
      yield {"speculation": scheme, "max_record_bytes": most, "park": "host"}
  if plan.speculation != "wait":
    for escapes in (0.5, 0.125):
      yield {"escape_bytes_per_param": escapes}


def _bucket_bytes(problem: Problem) -> tuple[int, ...]:
  """Every rank has its shard of a bucket, which is what it transfers.

  Sizes that cut the model into very many buckets are left out: a step of so
  many tasks is long to dispatch, and to simulate.
  """
  least = _wire_bytes(problem) / _MOST_BUCKETS
  ranks = problem.workload.num_ranks
  sizes = [ranks * size for size in transfer_bytes(problem.profile)]
  return (*(size for size in sizes[:-1] if size >= least), sizes[-1])


def _wire_bytes(problem: Problem) -> int:
  """Bytes of all gradients, in the working dtype."""
  elems = sum(leaf.size for leaf in problem.workload.model.leaves)
  return DTYPE_BYTES[problem.config.working_dtype] * elems


def transfer_bytes(profile: HardwareProfile) -> tuple[int, ...]:
  """Returns sizes of transfers to try, each twice the one before.

  From half of the knee, where both links reach 90 % of their best rate, or from
  where a transfer takes as long as its dispatch, if that is larger; to where
  dispatch is a small share of it, or the knee.
  """
  links = profile.d2h, profile.h2d
  first, last, knee = (
    max(_first(link, dispatches * profile.dispatch_s, share) for link in links)
    for dispatches, share in ((1, 0.0), (_DISPATCHES, 0.0), (0, _KNEE))
  )
  first, last = max(first, knee // 2), max(last, knee)
  return tuple(size for size in _SIZES if first <= size <= last)


def _first(link: Curve, seconds: float, share: float) -> int:
  """Returns the first size that takes so long, at that share of the best rate.

  The largest one if none does.
  """
  best = max(link.at(size) for size in _SIZES)
  for size in _SIZES:
    rate = link.at(size)
    if size / rate >= seconds and rate >= share * best:
      return size
  return _SIZES[-1]


def pool_threads(profile: HardwareProfile) -> tuple[int | None, ...]:
  """Returns the numbers of threads to try for updates; None is all cores.

  Fewer can be faster where programs run on the same cores, or where the host
  does something at a higher rate with fewer. Else they never are.
  """
  cores = profile.host_cores
  fewer = sorted({cores - 1, cores // 2} & {*range(1, cores)})
  if not profile.device_is_host:
    rates = profile.host_rates.values()
    fewer = [n for n in fewer if any(r.at(n) > r.at(cores) for r in rates)]
  return (*fewer, None) if fewer else ()
