"""Memory bound to a NUMA node, by the system call: libnuma is not needed."""

import ctypes
import os
import platform
from pathlib import Path

_HAS_MEMORY = Path("/sys/devices/system/node/has_memory")
# Numbers of mbind on the machines that there are kernels for.
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2
_MASK_BITS = 64


def memory_nodes() -> tuple[int, ...]:
  """Returns the NUMA nodes with memory; none if the system knows no nodes."""
  if not _HAS_MEMORY.exists():
    return ()
  nodes: list[int] = []
  for part in _HAS_MEMORY.read_text().strip().split(","):
    first, _, last = part.partition("-")
    nodes += range(int(first), int(last or first) + 1)
  return tuple(nodes)


def check_node(node: int) -> None:
  """Checks that memory can be asked of a node.

  Args:
    node: its number.

  Raises:
    ValueError: if it does not exist, or has no memory.
  """
  nodes = memory_nodes()
  if node not in nodes:
    raise ValueError(
      f"numa_node={node} is not a NUMA node with memory; this machine has"
      f" {list(nodes)}: choose one of these, or None to bind nothing"
    )


def bind(address: int, num_bytes: int, node: int) -> None:
  """Lets pages that come into RAM from now on come from one node only.

  Where it has none left, touching a page ends the process, or waits for one.

  Args:
    address: start of the memory, at a page.
    num_bytes: its size.
    node: number of the node.

  Raises:
    ValueError: if the node does not exist, or has no memory.
    OSError: if the system refuses, with its errno: EINVAL if this process may
      not use the node (cpuset), EPERM or ENOSYS in some containers.
  """
  check_node(node)
  num_words = node // _MASK_BITS + 1
  mask = (ctypes.c_uint64 * num_words)()
  mask[node // _MASK_BITS] = 1 << node % _MASK_BITS
  # The kernel reads one bit less than it is told.
  error = _mbind(address, num_bytes, mask, num_words * _MASK_BITS + 1)
  if error:
    raise OSError(
      error,
      f"mbind refused {num_bytes} bytes on numa_node={node}:"
      f" {os.strerror(error)}; allow the process that node and system call, or"
      " use None",
    )


def _mbind(
  address: int, num_bytes: int, mask: ctypes.Array, num_bits: int
) -> int:
  """Returns the errno of the system call, 0 if it did its work."""
  libc = ctypes.CDLL(None, use_errno=True)
  result = libc.syscall(
    ctypes.c_long(_MBIND[platform.machine()]),
    ctypes.c_void_p(address),
    ctypes.c_ulong(num_bytes),
    ctypes.c_long(_MPOL_BIND),
    mask,
    ctypes.c_ulong(num_bits),
    ctypes.c_ulong(0),
  )
  return 0 if result == 0 else ctypes.get_errno()
