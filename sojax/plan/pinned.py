"""The limit of the pinned memory that JAX hands out on a GPU.

XLA keeps the pinned memory of a process, of all its devices, in one pool, which
holds 64 GiB at most unless an environment variable says otherwise before JAX
starts. What is past it fails when it is allocated, perhaps after hours. Not
verified on a GPU.

References:
  GetGpuHostAllocator in xla/pjrt/gpu/gpu_helpers.cc of OpenXLA.
"""

from sojax.plan.account import Account

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The variable that sets it, in units of 2**30 bytes."""

DEFAULT_PINNED_LIMIT_BYTES = 64 << 30

_SPARED = 10
"""One part in so many is spared for holes in the pool, and for what passes
through it: an assumption."""


def pinned_limit_gb(pinned_bytes: int) -> int:
  """Returns what to set the limit to for that much pinned memory.

  >>> pinned_limit_gb(100 << 30)
  110
  """
  return -(-pinned_bytes * (_SPARED + 1) // (_SPARED << 30))


def needed_limit_gb(
  account: Account, limit_bytes: int = DEFAULT_PINNED_LIMIT_BYTES
) -> int | None:
  """Returns what a plan needs the limit to be; None if it is high enough.

  Args:
    account: of a plan, all ranks of which are in one process.
    limit_bytes: the limit as it is.
  """
  needed = pinned_limit_gb(account.pinned_bytes)
  return None if needed << 30 <= limit_bytes else needed


def check_pinned_limit(account: Account, limit_bytes: int | None) -> None:
  """Raises ValueError, which names the limit, if a plan needs a higher one.

  Args:
    account: of the plan.
    limit_bytes: the limit as it is; None if there is none.
  """
  if limit_bytes is None:
    return
  needed = needed_limit_gb(account, limit_bytes)
  if needed is not None:
    raise ValueError(
      f"the plan pins {account.pinned_bytes / 2**30:.1f} GiB of host memory,"
      " which with a tenth to spare is more than the"
      f" {limit_bytes / 2**30:.0f} GiB of JAX's pool; set"
      f" {PINNED_LIMIT}={needed} in the environment before Python starts"
    )
