"""What the built-in machines are put together from, and where it comes from.

Curves that follow from a few figures, hosts, and sources that machines share.
"""

from typing import Any

from sojax.plan.hardware import HOST_OPERATIONS, Curve

_KIB, _GIB = 1 << 10, 1 << 30

_STEP_SHARE = 0.85
_RELATIVE_RATES = {
  "record2": 30 / 28 / 1.17,
  "record3": 31 / 28 / 1.23,
  "undo": 31 / 28 / 1.15,
  "redo": 31 / 28 / 1.15,
}
"""Bytes over time, both relative to a step's 28 bytes and its time."""

HOST_RATES_SOURCE = (
  f"a step: {_STEP_SHARE} of host_bandwidth, an assumption: on x86 it is as"
  " fast as the fastest stream of its eight arrays (docs/results/adam.md),"
  " which need not reach STREAM's three. Records, undo and redo relative to"
  " it: bytes (cpu_ops/README.md) over measured times (docs/results/adam.md:"
  " 1.17, 1.23, redo 1.15; undo as redo, an assumption): 0.92, 0.90, 0.96,"
  " 0.96. Copies, sums and casts as a step, an assumption. Proportional to"
  " cores until that is reached"
)
_DISPATCH_SOURCE = (
  "assumption: 0.1 ms of Python and of JAX's dispatch for each program or"
  " transfer; calibrate measures a machine's own"
)
_EFFICIENCY_SOURCE = (
  "from 1e12 FLOPs: 0.55 = 0.79 x 0.7. 0.79: 769 to 798 of 989 TFLOP/s measured"
  " with bfloat16 matrices of 8192 x 8192 (1.1e12 FLOPs) on an H200. 0.7: share"
  " of a transformer's time in its matrix products, an assumption; Megatron-LM"
  " publishes up to 0.47 of an H100's peak for whole steps, communication"
  " included. Below: assumptions, some 30 kernels of a few microseconds each"
)
LINK_SOURCE = "; over bytes: 10 us for each transfer, an assumption, and that"
_PAGEABLE_SOURCE = (
  "assumption: memory that is not pinned is copied through pinned memory by one"
  " core; 10 us for each transfer"
)

EFFICIENCY = Curve(((1e9, 0.02), (1e10, 0.1), (1e11, 0.35), (1e12, 0.55)))


def link(bytes_per_s: float) -> Curve:
  """Returns a transfer's bytes/s, which its start of 10 us takes part in."""
  sizes = [64 * _KIB]
  while sizes[-1] < _GIB:
    sizes.append(2 * sizes[-1])
  return Curve(tuple((float(x), x / (1e-5 + x / bytes_per_s)) for x in sizes))


def _over_cores(one_core: float, limit: float) -> Curve:
  """Returns bytes/s of 1, 2, 4, .. cores, up to where they reach a limit."""
  points, cores = [], 1.0
  while cores * one_core < limit:
    points.append((cores, cores * one_core))
    cores *= 2
  return Curve((*points, (max(limit / one_core, 1.0), limit)))


def host(
  *, num_bytes: float, bandwidth: float, cores: int, one_core: float
) -> dict[str, Any]:
  """Returns the attributes of a host.

  Args:
    num_bytes: its memory.
    bandwidth: bytes/s that a stream of all cores reaches.
    cores: their number.
    one_core: bytes/s of a step on one core.
  """
  step = _STEP_SHARE * bandwidth
  rates = {}
  for operation in HOST_OPERATIONS:
    relative = _RELATIVE_RATES.get(operation, 1.0)
    rates[operation] = _over_cores(relative * one_core, relative * step)
  return {
    "host_bytes": int(num_bytes),
    "host_bandwidth": bandwidth,
    "host_cores": cores,
    "host_rates": rates,
    "dispatch_s": 1e-4,
    "host_task_s": 2e-4,
  }


def flops_by_dtype(half: float, full: float) -> dict[str, float]:
  """Returns FLOP/s by dtype: of both 16-bit ones, and of float32."""
  return {"bfloat16": half, "float16": half, "float32": full}


COMMON_SOURCES = {
  "efficiency": _EFFICIENCY_SOURCE,
  "d2h_pageable": _PAGEABLE_SOURCE,
  "h2d_pageable": _PAGEABLE_SOURCE,
  "dispatch_s": _DISPATCH_SOURCE,
  "host_task_s": (
    "assumption: about what calibrate measured on an x86 machine; nothing is"
    " made of it, since no program runs on the host's cores"
  ),
  "network_latency_s": "assumption: 20 us",
}

GRACE_CORE = 17e9
GRACE_SOURCES = {
  **COMMON_SOURCES,
  "host_bytes": "data sheet: 480 GB of LPDDR5X",
  "host_bandwidth": (
    "STREAM 486 of 546 GB/s (arXiv 2408.11556), on modules of 120 GB; NVIDIA's"
    " Grace tuning guide expects other results of modules of other sizes"
  ),
  "host_cores": "data sheet: 72 Neoverse V2",
  "host_rates": (
    f"{HOST_RATES_SOURCE}: by 24 cores. One core: 17 GB/s, derived: 28 bytes a"
    " parameter, 3.1 GHz, 20 cycles for four parameters (a division and a"
    " square root of 128 bits, an assumption). Comparison only: GraceAdam's"
    " published 0.608 s for 8e9 parameters are 368 GB/s, if it moves 28 bytes"
  ),
}

ZEN4 = host(num_bytes=768e9, bandwidth=350e9, cores=96, one_core=25e9)
ZEN4_SOURCES = {
  "host_bytes": "assumption: 12 modules of 64 GB",
  "host_bandwidth": (
    "STREAM triad, half of the 650 to 780 GB/s of two sockets that Microsoft"
    " gives for its HBv4: an EPYC of the fourth generation with 12 channels"
  ),
  "host_cores": "data sheet of an EPYC 9654: 96",
  "host_rates": (
    f"{HOST_RATES_SOURCE}: by 12 cores. One core: 25 GB/s, an assumption"
  ),
}
