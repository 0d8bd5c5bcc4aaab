"""Machines that can be planned for without being there, each figure sourced.

Figures of one device and of its share of a host. What a vendor promises is
called a data sheet's, and what follows from other figures here is derived, with
the arithmetic. What nobody has measured is an assumption, and says so: vary it
before you rely on it. Nothing here comes from a measurement of a training step.
"""

import types
from collections.abc import Mapping
from typing import Any

from sojax.plan.hardware import HardwareProfile
from sojax.plan.machine_parts import (
  COMMON_SOURCES,
  EFFICIENCY,
  GRACE_CORE,
  GRACE_SOURCES,
  HOST_RATES_SOURCE,
  LINK_SOURCE,
  ZEN4,
  ZEN4_SOURCES,
  flops_by_dtype,
  host,
  link,
)


def _gh200(
  name: str, gigabytes: int, bandwidth: float, source: str
) -> HardwareProfile:
  return HardwareProfile(
    name=name,
    device_flops=flops_by_dtype(989e12, 494e12),
    efficiency=EFFICIENCY,
    device_bytes=int(gigabytes * 1e9),
    device_bandwidth=bandwidth,
    d2h=link(297e9),
    h2d=link(375e9),
    d2h_pageable=link(20e9),
    h2d_pageable=link(20e9),
    **host(num_bytes=480e9, bandwidth=486e9, cores=72, one_core=GRACE_CORE),
    network_bandwidth=360e9,
    network_latency_s=2e-5,
    sources={
      **GRACE_SOURCES,
      "device_flops": "data sheet, dense; float32 is TF32",
      "device_bytes": f"data sheet: {gigabytes} GB",
      "device_bandwidth": source,
      "d2h": (
        "297 of 450 GB/s measured (arXiv 2408.11556)"
        f"{LINK_SOURCE}. Others saw 170 on nodes of four (Megatron-LM, issue"
        " 6491)"
      ),
      "h2d": (
        "375 of 450 GB/s measured (arXiv 2408.11556)"
        f"{LINK_SOURCE}. Others saw 346 (nvbandwidth, issue 23) and 411 to 421"
        " (Megatron-LM, issue 6491)"
      ),
      "network_bandwidth": (
        "within a node of four: 0.8, an assumption, of the data sheet's 450"
        " GB/s of NVLink 4 in a direction. Between nodes it is that of their"
        " network cards: 25 GB/s with Slingshot 11 at 200 Gbit/s a device"
      ),
    },
  )


def _gb200() -> HardwareProfile:
  return HardwareProfile(
    name="gb200",
    device_flops=flops_by_dtype(2500e12, 1250e12),
    efficiency=EFFICIENCY,
    device_bytes=int(186e9),
    device_bandwidth=7.2e12,
    d2h=link(182e9),
    h2d=link(175e9),
    d2h_pageable=link(20e9),
    h2d_pageable=link(20e9),
    **host(num_bytes=240e9, bandwidth=243e9, cores=36, one_core=GRACE_CORE),
    network_bandwidth=720e9,
    network_latency_s=2e-5,
    sources={
      **GRACE_SOURCES,
      "device_flops": (
        "data sheet of GB200 NVL72: 180 PFLOP/s bfloat16 dense and half of it"
        " TF32, of 72 devices"
      ),
      "device_bytes": "data sheet of GB200 NVL72: 13.4 TB / 72",
      "device_bandwidth": (
        "derived: 0.9, what an H200 reaches (4.3 of 4.8), of the data sheet's 8"
        " TB/s"
      ),
      "d2h": (
        "182 GB/s for each device while all send, measured on a GB300, whose"
        f" host is the same (Megatron-LM, issue 6491){LINK_SOURCE}. One device"
        " alone gets about 330 (torchtitan, pull request 3519), across NUMA"
        " nodes 115"
      ),
      "h2d": (
        "175 GB/s for each device while all receive, measured on a GB300"
        f" (Megatron-LM, issue 6491){LINK_SOURCE}. One device alone gets about"
        " 350 (torchtitan, pull request 3489), across NUMA nodes 120"
      ),
      "host_bytes": "half of a Grace's 480 GB: two devices share it",
      "host_bandwidth": (
        "half of a Grace's 486 GB/s (STREAM, arXiv 2408.11556): two devices"
        " share it"
      ),
      "host_cores": "half of a Grace's 72: two devices share it",
      "host_rates": (
        f"{HOST_RATES_SOURCE}: by 12 cores. One core: as in gh200-96"
      ),
      "network_bandwidth": (
        "0.8, an assumption, of the data sheet's 900 GB/s of NVLink 5 in a"
        " direction"
      ),
    },
  )


def _mi300a() -> HardwareProfile:
  """Returns an MI300A, whose host and device share one memory.

  A transfer is a copy within that memory: it takes the time in which the memory
  reads and writes its bytes once, which is what runs if nothing tells JAX that
  it need not copy. No casts or copies cross a link. The memory is divided in
  half between device and host; its bandwidth, which both have in full, is not
  divided, so that contention between the two is not seen.
  """
  memory = "an MI300A's one memory of 128 GB (data sheet)"
  copy = (
    "derived: a copy within the one memory, which reads and writes it: 3.6 TB/s"
    f" / 2{LINK_SOURCE}"
  )
  stream = (
    "about 3.6 of 5.3 TB/s, as arXiv 2508.12743 is remembered to report of the"
    " device; to be checked"
  )
  return HardwareProfile(
    name="mi300a",
    device_flops=flops_by_dtype(980.6e12, 122.6e12),
    efficiency=EFFICIENCY,
    device_bytes=int(64e9),
    device_bandwidth=3.6e12,
    d2h=link(1.8e12),
    h2d=link(1.8e12),
    d2h_pageable=link(1.8e12),
    h2d_pageable=link(1.8e12),
    **host(num_bytes=64e9, bandwidth=208e9, cores=24, one_core=25e9),
    network_bandwidth=100e9,
    network_latency_s=2e-5,
    sources={
      **COMMON_SOURCES,
      "device_flops": "data sheet, dense; float32 is the matrix units' FP32",
      "device_bytes": f"half of {memory}, an assumption",
      "device_bandwidth": stream,
      "d2h": copy,
      "h2d": copy,
      "d2h_pageable": copy,
      "h2d_pageable": copy,
      "host_bytes": f"the other half of {memory}",
      "host_bandwidth": (
        "208 GB/s that its cores reach, as arXiv 2508.12743 is remembered to"
        " report; to be checked"
      ),
      "host_cores": "data sheet: 24 Zen 4",
      "host_rates": (
        f"{HOST_RATES_SOURCE}: by 8 cores. One core: 25 GB/s, an assumption"
      ),
      "network_bandwidth": (
        "assumption: 100 GB/s to the three others of a node, of the data"
        " sheet's 128 GB/s of Infinity Fabric to each"
      ),
    },
  )


def _pcie(
  *,
  name: str,
  flops: Mapping[str, float],
  device_bytes: float,
  bandwidth: float,
  link_bytes_per_s: float,
  at_host: Mapping[str, Any],
  sources: Mapping[str, str],
) -> HardwareProfile:
  """Returns a device on PCIe with one socket of an x86 host to itself.

  Args:
    name: what it is called.
    flops: by dtype.
    device_bytes: its memory.
    bandwidth: bytes/s of that.
    link_bytes_per_s: of large transfers in either direction.
    at_host: the attributes of the host.
    sources: those of the figures that are not the same for all.
  """
  return HardwareProfile(
    name=name,
    device_flops=flops,
    efficiency=EFFICIENCY,
    device_bytes=int(device_bytes),
    device_bandwidth=bandwidth,
    d2h=link(link_bytes_per_s),
    h2d=link(link_bytes_per_s),
    d2h_pageable=link(10e9),
    h2d_pageable=link(10e9),
    **at_host,
    network_bandwidth=0.8 * link_bytes_per_s,
    network_latency_s=2e-5,
    sources={
      **COMMON_SOURCES,
      "network_bandwidth": (
        "assumption: 0.8 of the link, over which devices reach each other and"
        " the network cards"
      ),
      **sources,
    },
  )


_PCIE5_SOURCE = (
  f"assumption: 52 of 64 GB/s of PCIe 5 x16; 50 to 55 are usual{LINK_SOURCE}"
)


def _h100_pcie() -> HardwareProfile:
  return _pcie(
    name="h100-pcie",
    flops=flops_by_dtype(756e12, 378e12),
    device_bytes=80e9,
    bandwidth=1.8e12,
    link_bytes_per_s=52e9,
    at_host=ZEN4,
    sources={
      **ZEN4_SOURCES,
      "device_flops": "data sheet of the PCIe card, dense; float32 is TF32",
      "device_bytes": "data sheet: 80 GB",
      "device_bandwidth": (
        "derived: 0.9, what an H200 reaches (4.3 of 4.8), of the data sheet's 2"
        " TB/s"
      ),
      "d2h": _PCIE5_SOURCE,
      "h2d": _PCIE5_SOURCE,
    },
  )


def _h200_pcie() -> HardwareProfile:
  return _pcie(
    name="h200-pcie",
    flops=flops_by_dtype(989e12, 494e12),
    device_bytes=141e9,
    bandwidth=4.3e12,
    link_bytes_per_s=52e9,
    at_host=ZEN4,
    sources={
      **ZEN4_SOURCES,
      "device_flops": "data sheet of the SXM module, dense; float32 is TF32",
      "device_bytes": "data sheet: 141 GB",
      "device_bandwidth": "a copy, measured, of the data sheet's 4.8 TB/s",
      "d2h": _PCIE5_SOURCE,
      "h2d": _PCIE5_SOURCE,
    },
  )


def _a100_pcie() -> HardwareProfile:
  pcie4 = (
    "assumption: 25 of 32 GB/s of PCIe 4 x16, in the proportion that is usual"
    f" on PCIe 5{LINK_SOURCE}"
  )
  return _pcie(
    name="a100-pcie",
    flops=flops_by_dtype(312e12, 156e12),
    device_bytes=80e9,
    bandwidth=1.74e12,
    link_bytes_per_s=25e9,
    at_host=host(num_bytes=512e9, bandwidth=170e9, cores=64, one_core=20e9),
    sources={
      "device_flops": "data sheet of the 80 GB card, dense; float32 is TF32",
      "device_bytes": "data sheet: 80 GB",
      "device_bandwidth": (
        "derived: 0.9, what an H200 reaches (4.3 of 4.8), of the data sheet's"
        " 1.935 TB/s"
      ),
      "d2h": pcie4,
      "h2d": pcie4,
      "host_bytes": "assumption: 8 modules of 64 GB",
      "host_bandwidth": (
        "STREAM triad, half of the 330 to 350 GB/s of two sockets that"
        " Microsoft gives for its HBv3: an EPYC of the third generation with 8"
        " channels"
      ),
      "host_cores": "data sheet of an EPYC 7763: 64",
      "host_rates": (
        f"{HOST_RATES_SOURCE}: by 8 cores. One core: 20 GB/s, an assumption"
      ),
    },
  )


def _machines() -> dict[str, HardwareProfile]:
  gh200 = _gh200("gh200-96", 96, 3.4e12, "STREAM, of the data sheet's 4.0 TB/s")
  larger = _gh200(
    "gh200-144",
    144,
    4.4e12,
    "derived: 0.9, what an H200 with the same kind of memory reaches (4.3 of"
    " 4.8), of the data sheet's 4.9 TB/s",
  )
  others = _gb200(), _mi300a(), _h100_pcie(), _h200_pcie(), _a100_pcie()
  return {
    "gh200": gh200,
    **{profile.name: profile for profile in (gh200, larger, *others)},
  }


MACHINES: Mapping[str, HardwareProfile] = types.MappingProxyType(_machines())
"""The machines by name; "gh200" is "gh200-96"."""


def machine(name: str) -> HardwareProfile:
  """Returns one of `MACHINES`.

  Raises:
    ValueError: if there is none of that name.

  >>> machine("gh200").device_bytes
  96000000000
  """
  if name not in MACHINES:
    raise ValueError(f"there is no machine {name!r}; use one of {(*MACHINES,)}")
  return MACHINES[name]
