"""Documents and their split; the oracle is the text written to the disk."""

import json

import pytest

from sojax.data import text


def _write(path, content: bytes):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(content)
  return path


def test_text_file_is_one_document(tmp_path):
  path = _write(tmp_path / "a.txt", "häuser\n".encode())
  assert text.read_documents(path) == ["häuser\n".encode()]


def test_folder_gives_its_files_in_order_of_their_paths(tmp_path):
  _write(tmp_path / "b.txt", b"3")
  _write(tmp_path / "a/z.txt", b"2")
  _write(tmp_path / "a/tests/y.py", b"1")
  _write(tmp_path / "c/d/e/f.md", b"4")
  assert text.read_documents(tmp_path) == [b"1", b"2", b"3", b"4"]


def test_folder_leaves_out_hidden_files_and_empty_documents(tmp_path):
  _write(tmp_path / "a.txt", b"kept")
  _write(tmp_path / "empty.txt", b"")
  _write(tmp_path / ".hidden", b"\xff")
  _write(tmp_path / ".git/objects", b"\xff")
  assert text.read_documents(str(tmp_path)) == [b"kept"]


def test_json_lines_give_their_text_fields(tmp_path):
  texts = ["one", "two\u2028lines\n", "drei ß"]
  lines = [json.dumps({"text": s}, ensure_ascii=False) for s in texts]
  lines[0] = json.dumps({"id": 7, "text": texts[0]})
  lines.insert(1, "")
  path = _write(tmp_path / "a.jsonl", "\n".join(lines).encode())
  assert text.read_documents(path) == [s.encode() for s in texts]


def test_json_lines_in_a_folder_are_read_line_by_line(tmp_path):
  _write(tmp_path / "b.jsonl", b'{"text": "1"}\n{"text": "2"}\n')
  _write(tmp_path / "c.txt", b'{"text": "3"}')
  documents = text.read_documents(tmp_path)
  assert documents == [b"1", b"2", b'{"text": "3"}']


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.jsonl", b'{"text": "1"}\n\n{"txt": 2}', r"line 3 .*\"text\""),
    ("a.jsonl", b'{"text": 5}', r"line 1 .*\"text\""),
    ("a.jsonl", b'["text"]', r"line 1 .*\"text\""),
    ("a.jsonl", b'{"text": "1"}\n{"text"', r"line 2 is not JSON"),
    ("a.jsonl", b"\n\n", "no text"),
    ("a.txt", b"", "no text"),
    ("a.txt", b"ab\xff", "not UTF-8 text at byte 2"),
  ],
)
def test_bad_content_is_refused(tmp_path, name, content, message):
  path = _write(tmp_path / name, content)
  with pytest.raises(ValueError, match=message):
    text.read_documents(path)
  with pytest.raises(ValueError, match=message):
    text.read_documents(tmp_path)


def test_missing_path_is_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match=r"nowhere does not exist"):
    text.load_corpus(tmp_path / "nowhere")


def test_folder_without_files_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"no text \(0 files read\)"):
    text.load_corpus(tmp_path)


@pytest.mark.parametrize("num_docs", [2, 3, 19, 20, 21, 39, 40, 41])
def test_split_puts_every_document_on_one_side(num_docs):
  documents = [f"{i}\n".encode() for i in range(num_docs)]
  corpus = text.split_documents(documents)
  every = min(20, num_docs)
  validation = [d for i, d in enumerate(documents) if i % every == every - 1]
  train = [d for i, d in enumerate(documents) if i % every != every - 1]
  assert corpus.train.split(b"\0") == [*train, b""]
  assert corpus.validation.split(b"\0") == [*validation, b""]
  assert corpus.num_train_docs == len(train) > 0
  assert corpus.num_validation_docs == len(validation) > 0


@pytest.mark.parametrize(
  ("document", "train", "validation"),
  [
    (b"aaa\nbbb\nccc\nddd\n", b"aaa\nbbb\nccc\n", b"ddd\n"),
    (b"aaa\nbbb\nccccccc\n", b"aaa\nbbb\n", b"ccccccc\n"),
    (b"abcdefgh", b"abcdef", b"gh"),
    ("abcd\N{HIRAGANA LETTER A}x".encode(), b"abcd", "\u3042x".encode()),
  ],
)
def test_single_document_is_cut_near_its_end(document, train, validation):
  corpus = text.split_documents([document], validation_every=4)
  assert corpus.train == train + b"\0"
  assert corpus.validation == validation + b"\0"


def test_bad_splits_are_refused():
  with pytest.raises(ValueError, match="validation_every=1"):
    text.split_documents([b"a", b"b"], validation_every=1)
  with pytest.raises(ValueError, match="no document"):
    text.split_documents([])
  with pytest.raises(ValueError, match="one document of 19 bytes"):
    text.split_documents([b"a" * 19])
  with pytest.raises(ValueError, match="one document of 3 bytes"):
    text.split_documents(["\u3042".encode()], validation_every=2)


def test_standard_library_is_real_text_without_tests():
  files = text.standard_library_files()
  names = {file.name for file in files}
  assert {"argparse.py", "textwrap.py", "decoder.py"} <= names
  assert all(file.suffix == ".py" for file in files)
  parts = {part for file in files for part in file.parts[-3:-1]}
  assert not parts & {"site-packages", "test", "tests", "__pycache__"}
  keys = [file.as_posix() for file in files]
  assert keys == sorted(keys)


def test_default_corpus_is_the_standard_library():
  corpus = text.load_corpus()
  files = text.standard_library_files()
  texts = [file.read_bytes() for file in files]
  num_texts = sum(1 for content in texts if content)
  assert corpus.num_train_docs + corpus.num_validation_docs == num_texts
  num_bytes = sum(len(content) + 1 for content in texts if content)
  assert len(corpus.train) + len(corpus.validation) == num_bytes
  assert 10 * len(corpus.validation) < len(corpus.train)
  assert texts[0] + b"\0" == corpus.train[: len(texts[0]) + 1]
