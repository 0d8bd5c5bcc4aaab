"""Saves a training state leaf by leaf, and restores it, all or nothing.

A run's directory holds one directory per checkpoint:

    run/step_00000010/
      manifest.json      the model's leaves, scalars, the user's state; range,
                         dtype and CRC-32 of every stored array; size and CRC-32
                         of every file
      items/00000, ...   the arrays (see `array_store`)

Nothing stored depends on a plan: master weights and moments are whole model
leaves in float32, cut only where one would not fit into memory a second time.

A checkpoint is written beside its place and renamed when it is complete and on
the disk, so whatever has its name and a manifest is complete:

    step_00000010.partial    being written; removed by the next save
    step_00000010.replaced   the previous one of the same step, while the new
                             one takes its name; counts as complete until then
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from sojax import array_store
from sojax.array_store import CheckpointError

if TYPE_CHECKING:
  from sojax.runtime.state import TrainState

FORMAT = 1
"""Version of the layout on disk; a reader refuses every other one."""

MANIFEST = "manifest.json"
_ITEMS = "items"
_PARTIAL = ".partial"
_REPLACED = ".replaced"
_NAME = re.compile(r"step_(\d{8,})(\.partial|\.replaced)?")

_Other = dict[str, np.ndarray]


def save(
  directory: str | os.PathLike[str],
  state: "TrainState",
  *,
  user_state: Mapping[str, Any] | None = None,
  keep: int | None = None,
) -> Path:
  """Saves `state` as the checkpoint of its step, and makes it durable.

  A process killed at any moment leaves the checkpoints as they were, or the new
  one complete. A checkpoint of the same step is replaced. Takes about
  2 * array_store.ITEM_BYTES of extra memory. One process at a time may save
  into a directory; the state must not change meanwhile.

  Args:
    directory: the run's directory, made if it does not exist.
    state: what to save; scalars()["num_steps"] numbers the checkpoint.
    user_state: what the caller wants back from `restore`, made of dicts with
      str keys, lists, str, int, float, bool and None.
    keep: if given, how many checkpoints to leave: the new one and those with
      the highest other steps.

  Returns:
    The path of the new checkpoint.

  Raises:
    ValueError: if `user_state` holds anything else or `keep` is below 1;
      nothing is written then.
  """
  if keep is not None and keep < 1:
    raise ValueError(f"keep={keep} would leave no checkpoint; use 1 or more")
  other = state.other_state()
  content = _describe(state, other, dict(user_state or {}))
  directory = Path(directory).absolute()
  directory.mkdir(parents=True, exist_ok=True)
  _settle(directory)
  path = directory / f"step_{content['step']:08d}"
  partial = Path(f"{path}{_PARTIAL}")
  try:
    (partial / _ITEMS).mkdir(parents=True)
    content["items"] = _write_arrays(partial, state, other)
    _write_manifest(partial, content)
    _sync_tree(partial)
    _publish(partial, path)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise
  if keep is not None:
    _prune(directory, keep, newest=path)
  return path


def restore(
  path_or_directory: str | os.PathLike[str], state: "TrainState"
) -> dict[str, Any]:
  """Restores `state` from a checkpoint after checking all of it.

  Everything is read twice: first to compare all files and arrays with their
  checksums, then to load them. Takes about 2 * array_store.ITEM_BYTES of extra
  memory.

  Args:
    path_or_directory: a checkpoint, or a run's directory, of which the `latest`
      is taken.
    state: a state of the same model, overwritten.

  Returns:
    The `user_state` given to `save`.

  Raises:
    FileNotFoundError: if there is no such checkpoint, or no complete one.
    CheckpointError: if the checkpoint is damaged or of another model; gives
      path and reason. The state is unchanged, unless the message says that
      files changed after they had been verified.
  """
  path = _resolve(Path(path_or_directory).absolute())
  content = _read_manifest(path)
  items = [array_store.Item.from_dict(item) for item in content["items"]]
  wanted = state.other_state()
  other = {name: np.empty(x.shape, x.dtype) for name, x in wanted.items()}
  _check_model(path, content, state, other)
  _check_coverage(path, items, _arrays(state, other))
  array_store.read_items(path / _ITEMS, items, lambda part, array: None)
  try:
    _load_arrays(path, items, state, other)
  except CheckpointError as error:
    raise CheckpointError(
      f"{error}; it changed after it had been verified, and the state is now"
      " partly overwritten: restore again before training"
    ) from error
  state.load_other_state(other)
  state.load_scalars(content["scalars"])
  return content["user_state"]


def latest(directory: str | os.PathLike[str]) -> Path:
  """Finds the complete checkpoint of the highest step.

  Directories without a manifest and those still being written are passed over.

  Args:
    directory: a run's directory.

  Returns:
    The path of the checkpoint, fit for `restore`.

  Raises:
    FileNotFoundError: if there is none.
  """
  directory = Path(directory).absolute()
  found = _complete(directory) if directory.is_dir() else []
  if not found:
    raise FileNotFoundError(
      f"{directory} holds no complete checkpoint (step_*/{MANIFEST}); save one"
      " first or give another directory"
    )
  return found[-1]


def _describe(
  state: "TrainState", other: _Other, user_state: dict[str, Any]
) -> dict[str, Any]:
  """Returns the manifest's content, but for the items."""
  scalars = state.scalars()
  _check_json(scalars, "scalars")
  _check_json(user_state, "user_state")
  return {
    "format": FORMAT,
    "step": scalars["num_steps"],
    **_tables(state, other),
    "scalars": scalars,
    "user_state": user_state,
  }


def _check_json(value: Any, where: str) -> None:
  """Refuses what JSON would drop or turn into something else."""
  if isinstance(value, dict):
    for key, entry in value.items():
      if not isinstance(key, str):
        raise ValueError(f"{where} has the key {key!r}; use str keys only")
      _check_json(entry, f"{where}[{key!r}]")
  elif isinstance(value, list):
    for index, entry in enumerate(value):
      _check_json(entry, f"{where}[{index}]")
  elif value is not None and not isinstance(value, str | int | float):
    raise ValueError(
      f"{where} is of type {type(value).__name__}, which JSON does not keep;"
      " use dict, list, str, int, float, bool or None"
    )


def _tables(
  state: "TrainState", other: _Other
) -> dict[str, list[dict[str, Any]]]:
  """Describes the arrays that a checkpoint and a state must share."""
  return {
    "leaves": [
      {"name": x.name, "shape": list(x.shape), "trained": x.trained}
      for x in state.leaves
    ],
    "other": [
      {"name": name, "shape": list(x.shape), "dtype": x.dtype.name}
      for name, x in other.items()
    ],
  }


def _arrays(state: "TrainState", other: _Other) -> list[array_store.ArraySpec]:
  """Lists all that is stored."""
  arrays = []
  kinds: tuple[array_store.Kind, ...] = ("master", "mu", "nu")
  for leaf in state.leaves:
    for kind in kinds if leaf.trained else kinds[:1]:
      arrays.append(
        array_store.ArraySpec(kind, leaf.name, leaf.size, "float32")
      )
  for name, array in other.items():
    arrays.append(
      array_store.ArraySpec("other", name, array.size, array.dtype.name)
    )
  return arrays


def _write_arrays(
  path: Path, state: "TrainState", other: _Other
) -> list[dict[str, Any]]:
  """Writes all arrays; returns the items' entries for the manifest."""
  index_of = {leaf.name: i for i, leaf in enumerate(state.leaves)}

  def read(part: array_store.Part) -> np.ndarray:
    if part.kind == "other":
      flat = np.ascontiguousarray(other[part.name]).reshape(-1)
      return flat[part.start : part.stop]
    return state.read(index_of[part.name], part.kind, part.start, part.stop)

  items = array_store.pack(_arrays(state, other))
  items = array_store.write_items(path / _ITEMS, items, read)
  return [asdict(item) for item in items]


def _load_arrays(
  path: Path,
  items: Sequence[array_store.Item],
  state: "TrainState",
  other_inout: _Other,
) -> None:
  index_of = {leaf.name: i for i, leaf in enumerate(state.leaves)}

  def write(part: array_store.Part, array: np.ndarray) -> None:
    if part.kind == "other":
      flat = other_inout[part.name].reshape(-1)
      flat[part.start : part.stop] = array
    else:
      state.write(index_of[part.name], part.kind, part.start, array)

  array_store.read_items(path / _ITEMS, items, write)


def _check_model(
  path: Path, content: dict[str, Any], state: "TrainState", other: _Other
) -> None:
  """Refuses a checkpoint of other leaves, other arrays or other scalars."""
  for table, wanted in _tables(state, other).items():
    saved = {entry["name"]: entry for entry in content[table]}
    for entry in wanted:
      found = saved.pop(entry["name"], None)
      if found != entry:
        _refuse(path, entry["name"], found, entry)
    for name, entry in saved.items():
      _refuse(path, name, entry, None)
  saved, wanted = sorted(content["scalars"]), sorted(state.scalars())
  if saved != wanted:
    raise CheckpointError(
      f"{path} holds the scalars {saved}, the state has {wanted}; restore it"
      " with the settings it was saved with"
    )


def _refuse(
  path: Path,
  name: str,
  saved: dict[str, Any] | None,
  wanted: dict[str, Any] | None,
) -> NoReturn:
  def words(entry: dict[str, Any] | None) -> str:
    fields = entry.items() if entry else ()
    return " ".join(f"{k}={v}" for k, v in fields if k != "name") or "absent"

  raise CheckpointError(
    f"{path} is of another model: {name!r} is {words(saved)} in the checkpoint"
    f" and {words(wanted)} in the model; build the model it was saved from"
  )


def _check_coverage(
  path: Path,
  items: Sequence[array_store.Item],
  arrays: Iterable[array_store.ArraySpec],
) -> None:
  """Checks that the parts, in order, make up each array exactly."""
  wanted = {(a.kind, a.name): a.size for a in arrays}
  stops = dict.fromkeys(wanted, 0)
  for part in (part for item in items for part in item.parts):
    if stops.get((part.kind, part.name)) != part.start:
      raise CheckpointError(f"{path / MANIFEST} lists {part} out of order")
    stops[part.kind, part.name] = part.stop
  if stops != wanted:
    name = next(name for name in wanted if stops[name] != wanted[name])
    raise CheckpointError(
      f"{path / MANIFEST} lists {stops[name]} of the {wanted[name]} elements of"
      f" {name}"
    )


def _write_manifest(path: Path, content: dict[str, Any]) -> None:
  manifest = {"crc32": _manifest_crc32(content), "content": content}
  text = json.dumps(manifest, indent=1)
  (path / MANIFEST).write_text(text, encoding="utf-8")


def _read_manifest(path: Path) -> dict[str, Any]:
  file = path / MANIFEST
  if not file.is_file():
    raise CheckpointError(f"{file} is missing; restore another checkpoint")
  try:
    manifest = json.loads(file.read_bytes())
    content, crc32 = manifest["content"], manifest["crc32"]
  except (ValueError, KeyError, TypeError) as error:
    raise CheckpointError(
      f"{file} is damaged: {error!r}; restore another checkpoint"
    ) from error
  if crc32 != _manifest_crc32(content):
    raise CheckpointError(
      f"{file} is damaged: its CRC-32 is not {crc32}; restore another"
      " checkpoint"
    )
  if content["format"] != FORMAT:
    raise CheckpointError(
      f"{file} has format {content['format']}, this version reads {FORMAT};"
      " restore it with the version that wrote it"
    )
  return content


def _manifest_crc32(content: Any) -> int:
  return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _resolve(path: Path) -> Path:
  """Returns the checkpoint that `path` is, or the latest in it."""
  if not path.is_dir():
    raise FileNotFoundError(f"{path} is no directory; give a checkpoint or run")
  is_checkpoint = _NAME.fullmatch(path.name) or (path / MANIFEST).exists()
  return path if is_checkpoint else latest(path)


def _complete(directory: Path) -> list[Path]:
  """Lists the complete checkpoints, the highest step last."""
  found = []
  for path in directory.iterdir():
    name = _NAME.fullmatch(path.name)
    if name and name[2] != _PARTIAL and (path / MANIFEST).is_file():
      found.append((int(name[1]), name[2] is None, path))
  return [path for _, _, path in sorted(found)]


def _settle(directory: Path) -> None:
  """Clears away what a killed save left behind."""
  for path in list(directory.iterdir()):
    name = _NAME.fullmatch(path.name)
    final = path.with_suffix("")
    if name and name[2] == _REPLACED and not final.exists():
      os.rename(path, final)
    elif name and name[2]:
      shutil.rmtree(path)


def _publish(partial: Path, path: Path) -> None:
  """Gives a complete checkpoint its name, in place of an earlier one."""
  replaced = Path(f"{path}{_REPLACED}")
  if path.exists():
    os.rename(path, replaced)
  os.rename(partial, path)
  _sync(path.parent)
  if replaced.exists():
    shutil.rmtree(replaced)


def _prune(directory: Path, keep: int, *, newest: Path) -> None:
  """Removes the checkpoints of the lowest steps, but never `newest`."""
  others = [path for path in _complete(directory) if path != newest]
  for path in others[: max(0, len(others) - (keep - 1))]:
    # Renamed first, so that one half removed never counts as complete.
    doomed = Path(f"{path}{_PARTIAL}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _sync_tree(path: Path) -> None:
  for root, _, files in os.walk(path, topdown=False):
    for name in files:
      _sync(Path(root, name))
    _sync(Path(root))


def _sync(path: Path) -> None:
  """Waits until a file's bytes, or a directory's names, are on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
