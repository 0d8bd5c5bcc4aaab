"""Encodings; the oracles are the text itself and tokens worked out by hand."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from experiments import encodings
from sojax import data
from tests.tokenizing import byte_pair_tokenizer

_TEXT = "the hat, a h\u00e9n \u65e5\u672c\n\n\0the\0\0 the \U0001f600 hen\0"
_MERGES = [("t", "h"), ("th", "e")]
_VOCAB = {"<unk>": 0, "t": 1, "h": 2, "e": 3, "th": 4, "the": 5}


def _save(path, tokenizer) -> str:
  tokenizer.save(str(path))
  return str(path)


def _by_hand(**options) -> tokenizers.Tokenizer:
  """A tokenizer that knows the word "the" and its letters."""
  return tokenizers.Tokenizer(
    tokenizers.models.BPE(_VOCAB, _MERGES, unk_token="<unk>", **options)
  )


@pytest.fixture
def byte_pairs(tmp_path):
  """A byte-level encoding with a few merges."""
  tokenizer = byte_pair_tokenizer([_TEXT], 275)
  return encodings.load(_save(tmp_path / "tokenizer.json", tokenizer))


@pytest.mark.parametrize("text", ["", "\0", "abc", _TEXT, _TEXT + "end"])
def test_round_trip(byte_pairs, text):
  text = text.encode()
  for encoding in (byte_pairs, encodings.load(None)):
    tokens = encoding.encode(text)
    assert encoding.decode(tokens) == text
    assert tokens.size == 0 or 0 <= tokens.max() < encoding.vocab_size
    ends = encoding.ends(text)
    assert ends.shape == tokens.shape and ends.dtype == np.int64
    assert np.all(np.diff(ends) >= 0) and (not text or ends[-1] == len(text))


def test_tokens_are_int32_and_fewer_than_bytes(byte_pairs):
  text = _TEXT.encode()
  tokens = byte_pairs.encode(text)
  assert tokens.dtype == np.int32 and tokens.ndim == 1
  assert tokens.size < len(text)


def test_ends_are_those_of_each_decoded_prefix(byte_pairs):
  """Where a prefix ends within a character, of that character."""
  text = _TEXT.encode()
  tokens, ends = byte_pairs.encode(text), byte_pairs.ends(text)
  for i, end in enumerate(ends):
    prefix = byte_pairs.decode(tokens[: i + 1])
    if "\N{REPLACEMENT CHARACTER}" not in prefix.decode():
      assert len(prefix) == end
    text[:end].decode()


def test_separator_is_one_added_token_wherever_it_stands(tmp_path):
  tokenizer = _by_hand()
  tokenizer.normalizer = normalizers.BertNormalizer()  # drops control codes
  encoding = encodings.load(_save(tmp_path / "t.json", tokenizer))
  assert encoding.vocab_size == 7
  text = b"THE\0\0het\0"
  assert encoding.encode(text).tolist() == [5, 6, 6, 2, 3, 1, 6]
  assert encoding.ends(text).tolist() == [3, 4, 5, 6, 7, 8, 9]
  assert encoding.encode(data.SEPARATOR).tolist() == [6]


def test_separator_in_the_vocabulary_is_used(tmp_path):
  tokenizer = _by_hand()
  tokenizer.add_tokens(["\0", "x"])
  encoding = encodings.load(_save(tmp_path / "t.json", tokenizer))
  assert encoding.vocab_size == 8
  assert encoding.encode(b"x\0the\0").tolist() == [7, 6, 5, 6]


def test_dropped_text_counts_for_the_token_after_it(tmp_path):
  tokenizer = _by_hand()
  tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
  encoding = encodings.load(_save(tmp_path / "t.json", tokenizer))
  text = "the  the \u3042 \0".encode()
  assert encoding.encode(text).tolist() == [5, 5, 0, 6]
  assert encoding.ends(text).tolist() == [3, 8, 12, 14]


def test_nothing_is_cut_off_padded_or_put_around(tmp_path):
  tokenizer = _by_hand()
  tokenizer.enable_truncation(2)
  tokenizer.enable_padding(length=50)
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single="<unk> $A", special_tokens=[("<unk>", 0)]
  )
  encoding = encodings.load(_save(tmp_path / "t.json", tokenizer))
  assert encoding.encode(b"thethethe").tolist() == [5, 5, 5]


def test_largest_token_decides_the_vocabulary(tmp_path):
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a")
  )
  tokenizer.decoder = decoders.Fuse()
  encoding = encodings.load(_save(tmp_path / "t.json", tokenizer))
  assert encoding.vocab_size == 10
  assert encoding.decode(np.array([9, 2, 5, 0])) == b"b\0a"


def test_digest_is_that_of_the_file(tmp_path):
  one = _save(tmp_path / "1.json", byte_pair_tokenizer([_TEXT], 275))
  same = _save(tmp_path / "2.json", byte_pair_tokenizer([_TEXT], 275))
  other = _save(tmp_path / "3.json", byte_pair_tokenizer([_TEXT], 274))
  digests = [encodings.load(path).sha256 for path in (one, same, other)]
  assert digests[0] == digests[1] != digests[2]
  assert encodings.load(None).sha256 is None


def test_what_is_no_tokenizer_of_use_is_refused(tmp_path):
  def refuses(message, content=None):
    path = tmp_path / "t.json"
    if content is not None:
      path.write_text(content)
    with pytest.raises(ValueError, match=f"t.json is no .*{message}"):
      encodings.load(str(path))

  refuses("file; give a JSON file")
  refuses("Model missing", "{}")
  refuses("of use here", "not JSON")
  refuses("dropout=0.5 makes", _by_hand(dropout=0.5).to_str())
  gap = json.loads(_by_hand().to_str())
  gap["model"]["vocab"]["the"] = 6  # the number that the library adds next
  refuses("7 tokens share 6 numbers", json.dumps(gap))
  with pytest.raises(ValueError, match="is no file"):
    encodings.load(str(tmp_path))
