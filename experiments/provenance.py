"""What a result belongs to: the code, the packages and the machine."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from sojax.calibrate import cpu_name

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers")


def provenance() -> dict[str, Any]:
  """Returns "commit" and "machine" of this process, ready for JSON.

  The commit carries the suffix "-dirty" if tracked files have changed, and is
  None outside a git checkout.
  """
  return {"commit": _commit(), "machine": _machine()}


def _commit() -> str | None:
  command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
  root = Path(__file__).parents[1]
  try:
    result = subprocess.run(
      [*command, "--match="], cwd=root, capture_output=True, text=True
    )
  except FileNotFoundError:
    return None
  return result.stdout.strip() or None


def _machine() -> dict[str, Any]:
  return {
    "cpu": cpu_name(),
    "cores": len(os.sched_getaffinity(0)),
    "python": platform.python_version(),
    "platform": platform.platform(),
    "packages": {name: metadata.version(name) for name in _PACKAGES},
  }
