"""Text to train on: documents read from disk and split in two.

A document is the content of one file, or one line of a JSON Lines file. The
split is by document, so that no validation text has been trained on, and it
depends on nothing but the order of the documents.
"""

import dataclasses
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

SEPARATOR = b"\0"
"""The byte that ends each document in `Corpus.train` and `.validation`."""

_VALIDATION_EVERY = 20
_TEXT_FIELD = "text"

# Directories of a Python installation that hold no hand-written library:
# packages installed into it, its own tests, and build configuration.
_SKIPPED_DIRS = frozenset(
  {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
  }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
  """Training and validation text, each document ended by `SEPARATOR`."""

  train: bytes
  """Text to train on."""
  validation: bytes
  """Text of other documents, to validate on."""
  num_train_docs: int
  """Documents in `train`."""
  num_validation_docs: int
  """Documents in `validation`."""


def standard_library_files() -> list[Path]:
  """Lists the Python sources of the running Python's standard library.

  Real text of about ten megabytes that is on every machine. Tests and
  installed packages are left out.

  Returns:
    Paths of .py files, sorted by their path below the library's directory.

  Raises:
    ValueError: if this Python has no standard library in source form.
  """
  root = Path(sysconfig.get_path("stdlib"))
  files = [
    path
    for path in _sorted_files(root, _SKIPPED_DIRS)
    if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
  ]
  if not files:
    raise ValueError(
      f"no .py file of the standard library in {root}: this Python ships "
      "compiled files only; give a data path"
    )
  return files


def read_documents(path: str | os.PathLike[str]) -> list[bytes]:
  """Reads the documents of a text file, a folder or a JSON Lines file.

  Args:
    path: a file whose name ends in .jsonl (each line an object with a string
      field "text"; each one document), any other file (one document), or a
      folder (each non-hidden file in it, at any depth, sorted by path; its
      .jsonl files by line, its other files as one document each).

  Returns:
    The documents that are not empty, as UTF-8, in order.

  Raises:
    ValueError: if the path does not exist, holds no text, holds something
      that is not UTF-8, or if a line of a JSON Lines file is no object with
      a string field "text" (named with its line number).
  """
  root = Path(path)
  if not root.exists():
    raise ValueError(f"data path {root} does not exist")
  files = _sorted_files(root) if root.is_dir() else [root]
  documents = [text for file in files for text in _read_file(file) if text]
  if not documents:
    raise ValueError(
      f"data path {root} holds no text ({len(files)} files read); give a "
      "text file, a folder of them or a .jsonl file"
    )
  return documents


def split_documents(
  documents: Sequence[bytes], *, validation_every: int = _VALIDATION_EVERY
) -> Corpus:
  r"""Splits documents into training and validation text.

  The last of every `validation_every` documents is validated on. Fewer
  documents than that give their last one, and a single document is cut in
  two at the end of the line nearest before the same share of its end.

  >>> corpus = split_documents([b"a", b"b", b"c", b"d"], validation_every=2)
  >>> corpus.train, corpus.validation
  (b'a\x00c\x00', b'b\x00d\x00')

  Args:
    documents: texts, none of them empty.
    validation_every: one of so many documents is kept for validation; at
      least 2.

  Raises:
    ValueError: if there is no document, if the only one is too short to be
      cut, or if `validation_every` is below 2.
  """
  if validation_every < 2:
    raise ValueError(
      f"validation_every={validation_every} leaves nothing to train on; "
      "give 2 or more"
    )
  if not documents:
    raise ValueError("no document to split; give at least one")
  if len(documents) == 1:
    documents = _cut(documents[0], validation_every)
  every = min(validation_every, len(documents))
  validation = documents[every - 1 :: every]
  train = [text for i, text in enumerate(documents) if (i + 1) % every]
  return Corpus(
    train=b"".join(text + SEPARATOR for text in train),
    validation=b"".join(text + SEPARATOR for text in validation),
    num_train_docs=len(train),
    num_validation_docs=len(validation),
  )


def load_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
  """Reads and splits a data path, or the standard library's sources.

  Args:
    path: see `read_documents`; None for `standard_library_files`.

  Raises:
    ValueError: see `read_documents` and `split_documents`.
  """
  if path is not None:
    return split_documents(read_documents(path))
  documents = [file.read_bytes() for file in standard_library_files()]
  return split_documents([text for text in documents if text])


def _sorted_files(
  root: Path, skipped_dirs: Set[str] = frozenset()
) -> list[Path]:
  """Files below `root` that are not hidden, by their relative paths."""
  found = []
  for directory, subdirs, names in os.walk(root):
    subdirs[:] = [
      name
      for name in subdirs
      if name not in skipped_dirs and not name.startswith(".")
    ]
    found += [
      Path(directory, name) for name in names if not name.startswith(".")
    ]
  files = [path for path in found if path.is_file()]
  return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _read_file(file: Path) -> Iterator[bytes]:
  content = file.read_bytes()
  try:
    content.decode()
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{file} is not UTF-8 text at byte {error.start}; convert it or move "
      "it out of the data path"
    ) from error
  if file.suffix == ".jsonl":
    yield from _read_json_lines(file, content)
  else:
    yield content


def _read_json_lines(file: Path, content: bytes) -> Iterator[bytes]:
  # Not splitlines(): JSON strings may hold other line separators.
  for number, line in enumerate(content.split(b"\n"), start=1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except json.JSONDecodeError as error:
      raise ValueError(
        f"{file} line {number} is not JSON ({error.msg}); each line of a "
        f'.jsonl file is an object such as {{"{_TEXT_FIELD}": "..."}}'
      ) from error
    text = record.get(_TEXT_FIELD) if isinstance(record, dict) else None
    if not isinstance(text, str):
      raise ValueError(
        f'{file} line {number} has no string field "{_TEXT_FIELD}"; each '
        "line needs one"
      )
    yield text.encode()


def _cut(document: bytes, validation_every: int) -> list[bytes]:
  """Cuts the last share off, at the end of a line or else of a character."""
  goal = len(document) - len(document) // validation_every
  end_of_line = document.rfind(b"\n", 0, goal) + 1
  cut = end_of_line or goal
  while 0 < cut < len(document) and document[cut] & 0xC0 == 0x80:
    cut -= 1  # this byte continues a character of UTF-8
  if not 0 < cut < len(document):
    raise ValueError(
      f"one document of {len(document)} bytes is too short to be split; "
      f"give at least {validation_every} bytes"
    )
  return [document[:cut], document[cut:]]
