"""Stores flat arrays as Orbax items of bounded size, with checksums.

Large arrays are cut into parts, small ones share an item. An item is an Orbax
PyTree, readable by Orbax alone, of the flat arrays "0", "1", ...; the `Part`s
say what they are.

Checksums are kept of the arrays, taken in memory, and of the files. The files
are compared before Orbax reads them: on damaged ones it allocates what they
say, and leaves reads behind that complain when its event loop is gone.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
from etils import epath

ITEM_BYTES = 128 * 2**20
"""Most bytes of arrays in one Orbax item.

Orbax holds every array of an item twice while it saves or reads, so the extra
memory is about 2 * ITEM_BYTES. Larger items save no time: saving one costs 10
to 20 ms and a dozen files beyond its bytes.
"""

Kind = Literal["master", "mu", "nu", "other"]


class CheckpointError(ValueError):
  """Reports a checkpoint that is damaged or does not belong to the model."""


class ArraySpec(NamedTuple):
  """Describes an array to store.

  Attributes:
    kind: which state of `name` it is.
    name: of the model leaf, or of the other array.
    size: number of elements.
    dtype: NumPy's name of the dtype.
  """

  kind: Kind
  name: str
  size: int
  dtype: str


@dataclass(frozen=True, kw_only=True)
class Part:
  """Describes one stored array: elements [start, stop) of an `ArraySpec`.

  Attributes:
    kind: the array's kind.
    name: the array's name.
    start: first element, in C order.
    stop: one past the last element.
    dtype: NumPy's name of the dtype.
    crc32: zlib's CRC-32 of the stored bytes; 0 until written.
  """

  kind: Kind
  name: str
  start: int
  stop: int
  dtype: str
  crc32: int = 0

  @property
  def num_elems(self) -> int:
    """Number of elements."""
    return self.stop - self.start

  @property
  def num_bytes(self) -> int:
    """Size of the stored array."""
    return self.num_elems * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class StoredFile:
  """Describes one file of an item.

  Attributes:
    name: path relative to the item's directory, with slashes.
    num_bytes: size of the file.
    crc32: zlib's CRC-32 of its bytes.
  """

  name: str
  num_bytes: int
  crc32: int


@dataclass(frozen=True, kw_only=True)
class Item:
  """Describes one Orbax item.

  Attributes:
    parts: its arrays, in order.
    files: all its files, once it is written.
  """

  parts: tuple[Part, ...]
  files: tuple[StoredFile, ...] = ()

  @classmethod
  def from_dict(cls, fields: Mapping[str, Any]) -> "Item":
    """Returns the item of which `fields` is the dataclasses.asdict."""
    return cls(
      parts=tuple(Part(**part) for part in fields["parts"]),
      files=tuple(StoredFile(**file) for file in fields["files"]),
    )


def pack(arrays: Iterable[ArraySpec]) -> list[Item]:
  """Cuts large arrays and groups small ones, in order, by ITEM_BYTES.

  Returns:
    Items of at most ITEM_BYTES (or of one element); together their parts hold
    every element exactly once. Empty arrays have no part: Orbax stores none.
  """
  groups: list[list[Part]] = []
  free_bytes = 0
  for kind, name, size, dtype in arrays:
    part_elems = max(1, ITEM_BYTES // np.dtype(dtype).itemsize)
    for start in range(0, size, part_elems):
      stop = min(start + part_elems, size)
      part = Part(kind=kind, name=name, start=start, stop=stop, dtype=dtype)
      if not groups or part.num_bytes > free_bytes:
        groups.append([])
        free_bytes = ITEM_BYTES
      groups[-1].append(part)
      free_bytes -= part.num_bytes
  return [Item(parts=tuple(parts)) for parts in groups]


def write_items(
  path: Path, items: Sequence[Item], read: Callable[[Part], np.ndarray]
) -> list[Item]:
  """Writes the items, reading the arrays of one at a time.

  Args:
    path: an existing directory; item i becomes `path`/0000i.
    items: what to write, from `pack`.
    read: returns a part's elements, flat and contiguous.

  Returns:
    The items with their checksums and files.
  """
  written = []
  handler = _handler()
  try:
    for index, item in enumerate(items):
      tree = {str(i): read(part) for i, part in enumerate(item.parts)}
      item_path = _item_path(path, index)
      item_path.mkdir()
      handler.save(item_path, args=ocp.args.PyTreeSave(tree))
      handler.finalize(item_path)
      parts = [
        replace(part, crc32=_crc32(array))
        for part, array in zip(item.parts, tree.values(), strict=True)
      ]
      del tree  # before the next item is read
      files = tuple(_list_files(Path(item_path)))
      written.append(Item(parts=tuple(parts), files=files))
  finally:
    handler.close()
  return written


def read_items(
  path: Path,
  items: Sequence[Item],
  write: Callable[[Part, np.ndarray], None],
) -> None:
  """Reads the items, one at a time, and hands on arrays found to be sound.

  Args:
    path: the directory given to the `write_items` function.
    items: what it returned.
    write: takes each part, in order, with its flat array; if it keeps the
      array, the memory is no longer bounded.

  Raises:
    CheckpointError: at the first item whose files or arrays are not those that
      were written; gives path and reason.
  """
  handler = _handler()
  try:
    for index, item in enumerate(items):
      item_path = _item_path(path, index)
      for file in item.files:
        _check_file(Path(item_path), file)
      tree = _read_item(handler, item_path, len(item.parts))
      for i, part in enumerate(item.parts):
        _check_array(item_path, part, tree[str(i)])
        write(part, tree.pop(str(i)))
      del tree  # before the next item is read
  finally:
    handler.close()


def _handler() -> ocp.PyTreeCheckpointHandler:
  # OCDBT keeps many small arrays in a few files: 14 instead of 1,800 for 600
  # leaves, and 0.2 s instead of 0.5 (2 x86 cores, ext4). Compression costs
  # several times the time of writing, and float32 weights hardly shrink.
  return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)


def _item_path(path: Path, index: int) -> epath.Path:
  return epath.Path(path / f"{index:05d}")


def _read_item(
  handler: ocp.PyTreeCheckpointHandler, item_path: epath.Path, num_arrays: int
) -> dict[str, Any]:
  names = [str(i) for i in range(num_arrays)]
  as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
  args = ocp.args.PyTreeRestore(restore_args=dict.fromkeys(names, as_numpy))
  try:
    tree = handler.restore(item_path, args=args)
  except Exception as error:
    # What Orbax cannot read surfaces as almost any error of Orbax, TensorStore
    # or JSON.
    raise CheckpointError(
      f"{item_path} cannot be read: {error!r}; restore another checkpoint"
    ) from error
  if not isinstance(tree, dict) or sorted(tree) != sorted(names):
    raise CheckpointError(
      f"{item_path} does not hold the arrays that the manifest lists; restore"
      " another checkpoint"
    )
  return tree


def _check_array(item_path: epath.Path, part: Part, array: Any) -> None:
  what = f"{item_path}: {part.kind} of {part.name!r} [{part.start}:{part.stop}]"
  if (
    not isinstance(array, np.ndarray)
    or array.shape != (part.num_elems,)
    or array.dtype.name != part.dtype
  ):
    raise CheckpointError(
      f"{what} is not an array of {part.num_elems} elements of {part.dtype};"
      " restore another checkpoint"
    )
  crc32 = _crc32(array)
  if crc32 != part.crc32:
    raise CheckpointError(
      f"{what} is damaged: its CRC-32 is {crc32:#010x}, not"
      f" {part.crc32:#010x}; restore another checkpoint"
    )


def _crc32(flat: np.ndarray) -> int:
  return zlib.crc32(flat.view(np.uint8).data)


def _list_files(item_path: Path) -> Iterator[StoredFile]:
  for file in sorted(item_path.rglob("*")):
    if file.is_file():
      yield StoredFile(
        name=file.relative_to(item_path).as_posix(),
        num_bytes=file.stat().st_size,
        crc32=_file_crc32(file),
      )


def _check_file(item_path: Path, file: StoredFile) -> None:
  path = item_path / file.name
  if not path.is_file():
    raise CheckpointError(f"{path} is missing; restore another checkpoint")
  num_bytes = path.stat().st_size
  if num_bytes != file.num_bytes:
    raise CheckpointError(
      f"{path} has {num_bytes} bytes, not {file.num_bytes}; restore another"
      " checkpoint"
    )
  crc32 = _file_crc32(path)
  if crc32 != file.crc32:
    raise CheckpointError(
      f"{path} is damaged: its CRC-32 is {crc32:#010x}, not"
      f" {file.crc32:#010x}; restore another checkpoint"
    )


def _file_crc32(path: Path) -> int:
  crc32 = 0
  with path.open("rb") as file:
    while chunk := file.read(2**20):
      crc32 = zlib.crc32(chunk, crc32)
  return crc32
