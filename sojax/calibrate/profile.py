"""This machine's profile, put together from what was measured."""

import dataclasses

from sojax.calibrate.device import (
  DeviceMemory,
  Flops,
  Links,
  device_bytes,
  is_host,
  measure_flops,
  measure_links,
  measure_memory,
)
from sojax.calibrate.host import HostRates, measure_host
from sojax.calibrate.machine import host_bytes, this_machine
from sojax.calibrate.runtime import measure_overhead
from sojax.calibrate.timing import Effort
from sojax.cluster.mesh import Placement
from sojax.plan.hardware import HardwareProfile
from sojax.plan.plan import DTYPE_BYTES

_NETWORK_LATENCY_S = 2e-5


def measure_profile(
  *,
  name: str = "this machine",
  effort: Effort | None = None,
) -> HardwareProfile:
  """Measures the first device of this machine, its links and its host.

  Nothing else should run meanwhile. All figures are medians. The network is
  assumed, not measured: as fast as the way to the host, with 20 us.

  Args:
    name: what to call the machine.
    effort: how much to measure; None for about a minute on two cores.

  Returns:
    The profile; `measured_on` is `this_machine`, and `sources` says how each
    figure came about.
  """
  effort = effort or Effort()
  placement = Placement.of(None)
  host = measure_host(effort)
  flops = measure_flops(effort, tuple(DTYPE_BYTES))
  memory = measure_memory(effort)
  links = measure_links(effort, placement)
  overhead = measure_overhead(effort)
  known_bytes = device_bytes(placement)
  return HardwareProfile(
    name=name,
    device_flops=flops.peaks,
    efficiency=flops.efficiency,
    device_bytes=known_bytes or host_bytes(),
    device_bandwidth=memory.in_place,
    **{x.name: getattr(links, x.name) for x in dataclasses.fields(Links)},
    host_bytes=host_bytes(),
    host_bandwidth=host.bandwidth,
    host_cores=host.cores,
    host_rates=host.rates,
    host_task_s=overhead.core_seconds,
    dispatch_s=overhead.seconds,
    network_bandwidth=links.d2h.points[-1][1],
    network_latency_s=_NETWORK_LATENCY_S,
    device_is_host=is_host(placement),
    sources={
      **_sources(flops, memory),
      **_host_sources(effort, host),
      "device_bytes": (
        "jax" if known_bytes else "jax does not say: the memory of the host"
      ),
    },
    measured_on=this_machine(),
  )


def _sources(flops: Flops, memory: DeviceMemory) -> dict[str, str]:
  into = "measured: into a new array"
  return {
    "device_flops": "measured: the best of square matrix products",
    "efficiency": f"measured: square matrix products of {flops.fastest}",
    "device_bandwidth": (
      "measured: a pass that changes float32 in place. Casts, into new memory:"
      f" to float32 {memory.widening:.3g}, to bfloat16 {memory.narrowing:.3g}"
    ),
    "d2h": f"{into} in pinned memory",
    "h2d": f"{into} from pinned memory",
    "d2h_pageable": f"{into} of NumPy",
    "h2d_pageable": f"{into} from NumPy",
    "dispatch_s": "measured: a step of a tiny model, over its tasks",
    "host_task_s": "measured: all threads of the same step, over its tasks",
    "network_bandwidth": "assumption: as d2h",
    "network_latency_s": "assumption",
  }


def _host_sources(effort: Effort, host: HostRates) -> dict[str, str]:
  best = max(
    host.rates,
    key=lambda name: max(rate for _, rate in host.rates[name].points),
  )
  return {
    "host_bytes": "the operating system",
    "host_bandwidth": f"measured: the most in host_rates, {best}",
    "host_cores": "the operating system: those of this process",
    "host_rates": (
      f"measured: the kernels on {effort.host_elems} parameters, with bfloat16"
      " gradients and weights"
    ),
  }
