"""What identifies the machine that a profile was measured on."""

import os
import platform
from pathlib import Path

import jax

from sojax.host.kernels import cpu_info


def this_machine() -> dict[str, str]:
  """Returns what a profile that is measured here carries.

  Returns:
    "cpu", "cores" (which this process may use), "device" (the first one) and
    "jax" (its version): see `HardwareProfile.check_measured_on`.
  """
  return {
    "cpu": cpu_name(),
    "cores": str(cpu_info().cores),
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
  }


def cpu_name() -> str:
  """Returns what the CPU calls itself."""
  cpuinfo = Path("/proc/cpuinfo")
  if cpuinfo.exists():
    for line in cpuinfo.read_text().splitlines():
      if line.startswith("model name"):
        return line.split(":", 1)[1].strip()
  return platform.processor() or platform.machine()


def host_bytes() -> int:
  """Returns the memory of this host."""
  return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
