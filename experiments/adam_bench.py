"""Compares the AdamW step of the host with others, and with its own variants.

Question:
  How far is the step from the time that its memory traffic takes, and how does
  it compare with other AdamWs for the CPU? What do records, redo, the norm and
  split masters cost?
Command:
  python -m experiments.adam_bench --params=134217728 --json=PATH
  `make bench-adam` does that with a Python for which it installs the peers.
Hardware:
  Any CPU, otherwise idle; 16 GiB of memory for 128M parameters.
Expected time:
  About ten minutes on two cores, and two minutes more the first time, when
  DeepSpeed's kernel is compiled.
Expected result:
  Each of `ratios` within the bound of `_BOUNDS`.

All contenders work with one thread for each core, and on the same arrays in
huge pages, except for the other AdamWs: those are compared as their users have
them, in memory that their own library allocates, and once more in our memory
(`_shared_memory`, `_huge_pages`; see adam/peers.py). In each round every
contender runs right before or right after the plain step: a pair. A ratio is
the median, over the rounds, of its time over that of the plain step beside it.
Rounds shuffle the order and get fresh gradients. Before all this, each
contender takes one step of a small state and must agree with AdamW in float64.

A pass goes through some hundred times the last-level cache, so that it finds
none of its data there; `cache` says how much, and `is_cold` whether it is.

The settings are float32 gradients, and bfloat16 gradients with bfloat16
weights written: 28 bytes per parameter each. `ratios` has one number for each
comparison, the less favourable of the settings in which it was made.

  stream: reads the same arrays and writes them as they were; the fastest of
    ordinary, non-temporal and (weights only) partly non-temporal stores, each
    with prefetches 0, 1, 2 and 4 KiB ahead. changing_stream: the fastest of
    those that change a bit of every float, as a step changes floats.
  three_pass: widens gradients, takes DeepSpeed's step, narrows masters.
  record3, record2: a step that can be taken back, with 3 or 2 bytes kept for
    each parameter. redo: takes back and steps again, in one pass.
  fused_norm: a step that also sums the squares of its gradients.
  split: a step of masters of which the weights are the high halves, against
    one that writes weights apart (copy).
"""

import os
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

from experiments.adam import arrays as memory
from experiments.adam import ours, peers
from experiments.adam.agreement import check_agreement
from experiments.adam.arrays import Arrays
from experiments.adam.pairing import (
  Contender,
  Pairs,
  base_deciles,
  base_seconds,
  fastest,
  measure,
  median_seconds,
  ratio,
)
from experiments.adam.settings import SETTINGS, Setting
from experiments.adam.stream import Stream
from experiments.provenance import provenance
from experiments.results import write_result
from sojax.host.kernels import Pool

_PARAMS = flags.DEFINE_integer("params", 1 << 27, "Parameters.", 1)
_PAIRS = flags.DEFINE_integer("pairs", 30, "Pairs of each comparison.", 1)
_PEERS = flags.DEFINE_bool("peers", True, "Compare with torch and DeepSpeed.")
_SWEEP = flags.DEFINE_bool("sweep", True, "Compare thread counts as well.")

# More than one piece of the kernels, and whole blocks of the stream.
_CHECKED_PARAMS = 70_016
_MAX_SWEEP_PAIRS = 10
# Passes over less than this many caches find part of their data there.
_COLD_CACHES = 32

_KEYS = {
  "stream": "stream_over_ours",
  "changing_stream": "changing_stream_over_ours",
  "deepspeed": "deepspeed_over_ours",
  "torch_fused": "torch_fused_over_ours",
  "optax": "optax_over_ours",
  "three_pass": "three_pass_over_ours",
  "deepspeed_shared_memory": "deepspeed_shared_memory_over_ours",
  "torch_fused_shared_memory": "torch_fused_shared_memory_over_ours",
  "optax_huge_pages": "optax_huge_pages_over_ours",
  "three_pass_shared_memory": "three_pass_shared_memory_over_ours",
  "record3": "record3_over_step",
  "record2": "record2_over_step",
  "redo": "redo_over_step",
  "fused_norm": "fused_norm_over_step",
  "split": "split_over_copy",
}
_AT_LEAST = {
  "stream_over_ours": 0.93,
  "changing_stream_over_ours": 0.93,
  "deepspeed_over_ours": 1.15,
  "torch_fused_over_ours": 1.05,
  "optax_over_ours": 2.0,
  "three_pass_over_ours": 2.1,
  "deepspeed_shared_memory_over_ours": 1.15,
  "torch_fused_shared_memory_over_ours": 1.05,
  "optax_huge_pages_over_ours": 2.0,
  "three_pass_shared_memory_over_ours": 2.1,
}
_AT_MOST = {
  "record3_over_step": 1.25,
  "record2_over_step": 1.20,
  "redo_over_step": 1.33,
  "fused_norm_over_step": 1.06,
  "split_over_copy": 1.0,
}


def main(argv: Sequence[str]) -> None:
  """Runs the experiment as the flags say."""
  if len(argv) > 1:
    raise app.UsageError(f"unexpected argument {argv[1]}")
  logging.set_verbosity(logging.WARNING)
  num_threads = len(os.sched_getaffinity(0))
  torch_peers = peers.TorchPeers(num_threads) if _PEERS.value else None
  stream = Stream()
  with Pool(num_threads) as pool:
    bench = Bench(pool, stream, torch_peers)
    bench.check_all()
    arrays = Arrays(_PARAMS.value, pool)
    settings = {s.name: bench.compare(arrays, s) for s in SETTINGS}
    sweep = _sweep(arrays, stream, settings) if _SWEEP.value else []
    result = {
      "ratios": less_favourable(settings),
      "settings": settings,
      "sweep": sweep,
      **_conditions(arrays, pool, stream, torch_peers),
      **provenance(),
    }
  write_result(result)
  print(table(result))


class Bench:
  """Makes contenders and compares them."""

  def __init__(
    self, pool: Pool, stream: Stream, torch_peers: peers.TorchPeers | None
  ):
    self._pool = pool
    self._stream = stream
    self._torch_peers = torch_peers

  def check_all(self) -> None:
    """Raises RuntimeError if not all contenders take the same step."""
    for setting in SETTINGS:
      arrays = Arrays(_CHECKED_PARAMS, self._pool)
      optax = [o.contender() for o in _optax(arrays, setting)]
      base = ours.step(arrays, setting, self._pool)
      contenders = [base, *optax, *self._others(arrays, setting)]
      check_agreement(contenders, arrays, setting)

  def compare(self, arrays: Arrays, setting: Setting) -> dict[str, Any]:
    """Compares all contenders in one setting."""
    arrays.reset()
    optax = _optax(arrays, setting)
    for each in optax:
      each.check_in_place()
    pairs = measure(
      ours.step(arrays, setting, self._pool),
      [*(o.contender() for o in optax), *self._others(arrays, setting)],
      _PAIRS.value,
      between_rounds=_Refresh(arrays),
    )
    result = summarise(pairs)
    num_bytes = setting.bytes_per_param * arrays.num_params
    return {
      **result,
      "gigabytes_per_s": num_bytes / result["median_s"]["step"] / 1e9,
      "escapes_per_value": {
        f"record{form}": count / (3 * arrays.num_params)
        for form, count in arrays.num_escapes.items()
      },
      "huge_page_share": {o.contender().name: o.huge_page_share for o in optax},
    }

  def _others(self, arrays: Arrays, setting: Setting) -> list[Contender]:
    num_threads = self._pool.num_threads
    others = self._stream.contenders(arrays, setting, num_threads)
    others += ours.variants(arrays, setting, self._pool)
    if self._torch_peers is not None:
      others += self._torch_peers.contenders(arrays, setting)
    return others


def _optax(arrays: Arrays, setting: Setting) -> list[peers.Optax]:
  return [peers.Optax(arrays, setting, huge_pages=h) for h in (False, True)]


class _Refresh:
  """Gives the next gradients at each call."""

  def __init__(self, arrays: Arrays):
    self._arrays = arrays
    self._number = 100

  def __call__(self) -> None:
    self._number += 1
    self._arrays.refresh_grads(self._number)


def summarise(pairs: Pairs) -> dict[str, Any]:
  """Returns the ratios of one setting.

  Args:
    pairs: of each contender with the plain step. Those of streams have names
      that begin with "stream" or "changing_stream"; the fastest of each counts.

  Returns:
    "ratios": by key, the median and quartiles; "stream": the name of the
    fastest; "streams": the same of each stream; "median_s": seconds by
    contender and of the plain "step"; "step_deciles_s": the nine of the
    latter, which tell whether the machine was the same all the time; "pairs":
    how many of each.
  """
  streams = {name: ratio(p) for name, p in pairs.items() if "stream" in name}
  stream = fastest(pairs, "stream")
  chosen = {
    "stream": stream,
    "changing_stream": fastest(pairs, "changing_stream"),
  }
  ratios = {
    key: ratio(pairs[chosen.get(name, name)])
    for name, key in _KEYS.items()
    if chosen.get(name, name) in pairs
  }
  return {
    "ratios": ratios,
    "stream": stream,
    "streams": streams,
    "median_s": {"step": base_seconds(pairs), **median_seconds(pairs)},
    "step_deciles_s": base_deciles(pairs),
    "pairs": len(pairs[stream]),
  }


def less_favourable(settings: dict[str, dict[str, Any]]) -> dict[str, float]:
  """Returns, of each ratio, the median that speaks less for the step."""
  ratios = {}
  for key in _KEYS.values():
    medians = [
      s["ratios"][key]["median"]
      for s in settings.values()
      if key in s["ratios"]
    ]
    if medians:
      ratios[key] = min(medians) if key in _AT_LEAST else max(medians)
  return ratios


def is_within(key: str, value: float) -> bool:
  """Returns whether a ratio is within its bound."""
  if key in _AT_LEAST:
    return value >= _AT_LEAST[key]
  return value <= _AT_MOST[key]


def table(result: dict[str, Any]) -> str:
  """Returns the ratios and the sweep in Markdown, a row for each setting."""
  rows = ["| ratio | setting | median | quartiles | bound | within |"]
  rows.append("| --- | --- | --- | --- | --- | --- |")
  for key in _KEYS.values():
    bound = (
      f">= {_AT_LEAST[key]}" if key in _AT_LEAST else f"<= {_AT_MOST[key]}"
    )
    for name, setting in result["settings"].items():
      if key in setting["ratios"]:
        median = setting["ratios"][key]["median"]
        low, high = setting["ratios"][key]["quartiles"]
        verdict = "yes" if is_within(key, median) else "no"
        rows.append(
          f"| {key} | {name} | {median:.3f} | {low:.3f}-{high:.3f} | {bound}"
          f" | {verdict} |"
        )
  if result["sweep"]:
    rows.append("\n| threads | setting | step, ms | GB/s | stream_over_ours |")
    rows.append("| --- | --- | --- | --- | --- |")
  for row in result["sweep"]:
    rows.append(
      f"| {row['threads']} | {row['setting']} | {1e3 * row['step_s']:.1f}"
      f" | {row['gigabytes_per_s']:.1f}"
      f" | {row['stream_over_ours']['median']:.3f} |"
    )
  if not result["cache"]["is_cold"]:
    rows.append("\nNot cache-cold: raise --params.")
  return "\n".join(rows)


def _sweep(
  arrays: Arrays, stream: Stream, settings: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
  """Compares the step with the fastest stream at several thread counts."""
  rows = []
  for setting in SETTINGS:
    name = settings[setting.name]["stream"]
    num_bytes = setting.bytes_per_param * arrays.num_params
    for num_threads in thread_counts(len(os.sched_getaffinity(0))):
      with Pool(num_threads) as pool:
        pairs = measure(
          ours.step(arrays, setting, pool),
          [stream.contender(arrays, setting, num_threads, name)],
          min(_PAIRS.value, _MAX_SWEEP_PAIRS),
        )
      rows.append(
        {
          "setting": setting.name,
          "threads": num_threads,
          "step_s": base_seconds(pairs),
          "gigabytes_per_s": num_bytes / base_seconds(pairs) / 1e9,
          "stream": name,
          "stream_over_ours": ratio(pairs[name]),
        }
      )
  return rows


def thread_counts(num_cores: int) -> list[int]:
  """Returns the powers of two below a number, and the number.

  >>> thread_counts(1), thread_counts(6)
  ([1], [1, 2, 4, 6])
  """
  powers = [1 << i for i in range(num_cores.bit_length())]
  return [n for n in powers if n < num_cores] + [num_cores]


def _conditions(
  arrays: Arrays,
  pool: Pool,
  stream: Stream,
  torch_peers: peers.TorchPeers | None,
) -> dict[str, Any]:
  cache_bytes = memory.last_level_cache_bytes()
  pass_bytes = SETTINGS[0].bytes_per_param * arrays.num_params
  num_caches = None if not cache_bytes else pass_bytes / cache_bytes
  return {
    "cache": {
      "last_level_bytes": cache_bytes,
      "pass_bytes": pass_bytes,
      "caches_per_pass": num_caches,
      "is_cold": None if num_caches is None else num_caches >= _COLD_CACHES,
    },
    "huge_page_share": arrays.huge_page_share(),
    "transparent_hugepage": memory.huge_page_policy(),
    "config": {
      "params": _PARAMS.value,
      "pairs": _PAIRS.value,
      "threads": pool.num_threads,
      "isa": pool.isa,
      "deepspeed_isa": torch_peers.deepspeed_isa if torch_peers else None,
      "torch_isa": torch_peers.torch_isa if torch_peers else None,
      "peers": peers.versions() if torch_peers else None,
      "stream_compiler": " ".join(stream.command),
    },
  }


if __name__ == "__main__":
  flags.mark_flag_as_required("json")
  app.run(main)
