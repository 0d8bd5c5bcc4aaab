"""The file that an experiment writes, and the flag that names it."""

import json
from pathlib import Path
from typing import Any

from absl import flags

# Flags are global, and tests import all scripts into one process.
_JSON = flags.DEFINE_string("json", None, "File to write.")


def write_result(result: dict[str, Any]) -> None:
  """Writes a result to the file that --json names, and makes its folder."""
  path = Path(_JSON.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(result, indent=2) + "\n")
