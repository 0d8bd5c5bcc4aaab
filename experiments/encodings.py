"""How text becomes tokens: as bytes, or by a file of the tokenizers library."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from sojax import data
from sojax.data import tokens as tokens_lib

_DOCUMENT = re.compile("[^\0]*\0|[^\0]+")  # ended by data.SEPARATOR


class Encoding(Protocol):
  """Turns a corpus' text into tokens and back; depends on nothing else.

  Attributes:
    vocab_size: tokens are in [0, vocab_size).
    sha256: digest of the file that defines the encoding, None without one.
  """

  vocab_size: int
  sha256: str | None

  def encode(self, text: bytes) -> np.ndarray:
    """Returns the tokens of a text, [n] of some integer dtype."""
    ...

  def ends(self, text: bytes) -> np.ndarray:
    """Returns how many bytes of a text its first i + 1 tokens stand for.

    Never falling, int64 [n]; the last is the length of a text that ends with
    `data.SEPARATOR`.
    """
    ...

  def decode(self, tokens: np.ndarray) -> bytes:
    """Returns the text that tokens stand for."""
    ...


class Bytes:
  """Each byte is a token, see `sojax.data.encode`.

  >>> Bytes().ends(b"abc")
  array([1, 2, 3])
  """

  vocab_size = tokens_lib.VOCAB_SIZE
  sha256: str | None = None

  def encode(self, text: bytes) -> np.ndarray:
    """Returns uint8 [len(text)], without copying."""
    return data.encode(text)

  def ends(self, text: bytes) -> np.ndarray:
    """Returns 1 to len(text)."""
    return np.arange(1, len(text) + 1)

  def decode(self, tokens: np.ndarray) -> bytes:
    """Returns the bytes."""
    return data.decode(tokens)


class Tokenizer:
  """A tokenizer of the tokenizers library, one document at a time.

  The separator of documents is one token, added to the vocabulary if it is not
  in there. Truncation, padding and the tokens that the file puts around a text
  are left out. Text in which a special token is spelled out becomes that token.

  Attributes:
    vocab_size: one more than the largest token.
    sha256: digest of the file.
  """

  def __init__(self, content: bytes):
    """Reads the content of a JSON file of the library.

    Raises:
      ValueError: if it is none, or encodes the same text differently each
        time, or, with the separator, gives one number to two tokens.
    """
    self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
    dropout = json.loads(content)["model"].get("dropout")
    if dropout:
      raise ValueError(
        f"dropout={dropout} makes the encoding random; set it to null"
      )
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    self._tokenizer.add_special_tokens([data.SEPARATOR.decode()])
    numbers = self._tokenizer.get_vocab().values()
    # The library numbers what is added by the size of the vocabulary, and so
    # twice if numbers below that are missing.
    if len(set(numbers)) < len(numbers):
      raise ValueError(
        f"{len(numbers)} tokens share {len(set(numbers))} numbers; number the "
        "vocabulary from 0 without gaps"
      )
    self.vocab_size = max(numbers) + 1
    self.sha256: str | None = hashlib.sha256(content).hexdigest()

  def encode(self, text: bytes) -> np.ndarray:
    """Returns the tokens of UTF-8 text, int32 [n]."""
    parts = [np.array(part.ids, np.int32) for _, part in self._parts(text)]
    return np.concatenate([np.empty(0, np.int32), *parts])

  def ends(self, text: bytes) -> np.ndarray:
    """Returns how many bytes of UTF-8 text the tokens up to each stand for.

    What the tokenizer drops between two tokens belongs to the later one, and a
    character that several tokens spell to the first of them.
    """
    found, start = [np.empty(0, np.int64)], 0
    for document, part in self._parts(text):
      ends = _char_ends(document)
      last_chars = np.array([last for _, last in part.offsets], np.int64)
      found.append(start + np.maximum.accumulate(ends[last_chars]))
      start += int(ends[-1])
    return np.concatenate(found)

  def decode(self, tokens: np.ndarray) -> bytes:
    """Returns UTF-8 text, with U+FFFD where tokens spell no character."""
    numbers = np.asarray(tokens).tolist()
    text = self._tokenizer.decode(numbers, skip_special_tokens=False)
    return text.encode()

  def _parts(self, text: bytes) -> Iterator[tuple[str, tokenizers.Encoding]]:
    for match in _DOCUMENT.finditer(text.decode()):
      document = match.group()
      yield (
        document,
        self._tokenizer.encode(document, add_special_tokens=False),
      )


def load(path: str | None) -> Encoding:
  """Returns the encoding that a file of the tokenizers library defines.

  Args:
    path: of its JSON file; None for bytes.

  Raises:
    ValueError: if there is no such file, or it is no tokenizer of use here.
  """
  if path is None:
    return Bytes()
  if not Path(path).is_file():
    raise ValueError(
      f"--tokenizer={path} is no file; give a JSON file of the tokenizers "
      "library"
    )
  try:
    return Tokenizer(Path(path).read_bytes())
  except ValueError as error:
    raise ValueError(
      f"--tokenizer={path} is no tokenizer of use here: {error}"
    ) from error


def _char_ends(text: str) -> np.ndarray:
  """Returns the bytes of UTF-8 of each number of leading characters, from 0."""
  points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
  widths = 1 + np.searchsorted([0x80, 0x800, 0x10000], points, side="right")
  return np.concatenate([[0], np.cumsum(widths)])
