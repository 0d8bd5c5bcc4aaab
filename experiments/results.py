"""The files that an experiment writes, and the flags that name them."""

import json
from pathlib import Path
from typing import Any

from absl import flags

# Flags are global, and tests import all scripts into one process.
_JSON = flags.DEFINE_string("json", None, "File to write.")
_PICTURE = flags.DEFINE_string("picture", None, "Picture to write, if any.")


def write_result(result: dict[str, Any]) -> None:
  """Writes a result to the file that --json names, if any; makes its folder."""
  if _JSON.value is None:
    return
  path = Path(_JSON.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(result, indent=2) + "\n")


def picture_path() -> Path | None:
  """Returns the file that --picture names, whose folder it makes."""
  if _PICTURE.value is None:
    return None
  path = Path(_PICTURE.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  return path
