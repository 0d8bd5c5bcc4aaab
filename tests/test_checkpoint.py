"""Checkpoints against a stand-in state made of plain NumPy arrays.

The oracle is the stand-in's own bytes: every element of every array, compared
as bytes, so that NaN payloads and signs of zero count.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from sojax import array_store, checkpoint

# Bits that arithmetic or a conversion would change: quiet and signalling NaNs
# with payloads, -0, subnormals, infinities.
_ODD_BITS = np.array(
  [
    0x7FC00001,
    0xFFC12345,
    0x7F800001,
    0xFFA00000,
    0x80000000,
    0x00000001,
    0x807FFFFF,
    0x7F800000,
    0xFF800000,
  ],
  np.uint32,
)
_SHAPES = {
  "embed.table": (37, 8),
  "block_0.norm.scale": (8,),
  "block_0.frozen": (5, 3),
  "block_0.empty": (0, 4),
  "head.bias": (),
  "head.zeros": (6,),
}


@dataclass(frozen=True)
class _Leaf:
  name: str
  shape: tuple[int, ...]
  trained: bool = True

  @property
  def size(self) -> int:
    return int(np.prod(self.shape, dtype=int))


class _State:
  """Holds every array flat in memory; the oracle and the thing restored."""

  def __init__(self, seed, *, num_steps=10, shapes=None):
    rng = np.random.default_rng(seed)
    self.leaves = tuple(
      _Leaf(name, shape, trained="frozen" not in name)
      for name, shape in (shapes or _SHAPES).items()
    )
    self.arrays = {}
    for index, leaf in enumerate(self.leaves):
      for kind in ("master", "mu", "nu") if leaf.trained else ("master",):
        bits = rng.integers(0, 2**32, leaf.size, dtype=np.uint32)
        bits[: len(_ODD_BITS)] = _ODD_BITS[: leaf.size]
        if "zeros" in leaf.name:
          bits[:] = 0
        self.arrays[index, kind] = bits.view(np.float32)
    self.scalar_values = {"num_steps": num_steps, "count": seed, "scale": 0.1}
    self.other_arrays = {
      "dropout.key": rng.integers(0, 2**32, (2, 2), dtype=np.uint32),
      "dropout.count": np.array(seed, np.int64),
      "norm.mean": np.asfortranarray(rng.normal(size=(3, 5))),
      "norm.low": rng.normal(size=7).astype(ml_dtypes.bfloat16),
      "flags": np.array([True, False, True]),
      "none": np.zeros((0, 2), np.float16),
    }

  def read(self, leaf_index, kind, start, stop):
    return self.arrays[leaf_index, kind][start:stop].copy()

  def write(self, leaf_index, kind, start, values):
    assert values.dtype == np.float32
    self.arrays[leaf_index, kind][start : start + len(values)] = values

  def scalars(self):
    return dict(self.scalar_values)

  def load_scalars(self, scalars):
    self.scalar_values = dict(scalars)

  def other_state(self):
    # order="K" keeps norm.mean in Fortran order.
    return {name: a.copy(order="K") for name, a in self.other_arrays.items()}

  def load_other_state(self, other):
    self.other_arrays = dict(other)

  def snapshot(self):
    """Returns every byte and every scalar, comparable with ==."""
    arrays = {key: array.tobytes() for key, array in self.arrays.items()}
    other = {
      name: (array.shape, array.dtype.name, array.tobytes())
      for name, array in self.other_arrays.items()
    }
    scalars = {
      name: (type(value), value) for name, value in self.scalar_values.items()
    }
    return arrays, other, scalars


@pytest.fixture
def small_items(monkeypatch):
  """Cuts the table into many parts and items."""
  monkeypatch.setattr(array_store, "ITEM_BYTES", 256)


def _files(path):
  return sorted(file for file in path.rglob("*") if file.is_file())


def test_every_bit_survives(tmp_path):
  saved = _State(1)
  user_state = {"position": [1, 2**70], "rate": 0.1, "none": None, "on": True}
  path = checkpoint.save(tmp_path / "run", saved, user_state=user_state)
  assert path == tmp_path / "run" / "step_00000010"
  restored = _State(2, num_steps=0)
  assert restored.snapshot() != saved.snapshot()
  assert checkpoint.restore(path, restored) == user_state
  assert restored.snapshot() == saved.snapshot()


def test_a_run_restores_its_latest_checkpoint(tmp_path):
  states = {n: _State(n, num_steps=n) for n in (9, 100000000, 12)}
  for state in states.values():
    checkpoint.save(tmp_path, state)
  assert checkpoint.latest(tmp_path) == tmp_path / "step_100000000"
  restored = _State(0)
  assert checkpoint.restore(tmp_path, restored) == {}
  assert restored.snapshot() == states[100000000].snapshot()


def test_any_item_size_restores_any_other(tmp_path, monkeypatch):
  saved = _State(1)
  num_items = {}
  for item_bytes in (64, 100, 1000, 2**20):
    monkeypatch.setattr(array_store, "ITEM_BYTES", item_bytes)
    path = checkpoint.save(tmp_path / str(item_bytes), saved)
    num_items[item_bytes] = len(list((path / "items").iterdir()))
    monkeypatch.setattr(array_store, "ITEM_BYTES", 16)
    restored = _State(2)
    checkpoint.restore(path, restored)
    assert restored.snapshot() == saved.snapshot()
  assert num_items[64] > num_items[100] > num_items[1000] > num_items[2**20]
  assert num_items[2**20] == 1


def test_parts_hold_every_element_once_in_items_of_bounded_size(monkeypatch):
  # Oracle: the items unrolled, element by element.
  monkeypatch.setattr(array_store, "ITEM_BYTES", 40)
  rng = np.random.default_rng(0)
  arrays = [
    array_store.ArraySpec("mu", str(i), int(size), dtype)
    for i, size in enumerate(rng.integers(0, 30, 100))
    for dtype in ("float32", "uint8", "float64")
  ]
  arrays = arrays[:: len(arrays) // 97]
  items = array_store.pack(arrays)
  elems = [
    (part.name, part.dtype, i)
    for item in items
    for part in item.parts
    for i in range(part.start, part.stop)
  ]
  assert elems == [(a.name, a.dtype, i) for a in arrays for i in range(a.size)]
  sizes_bytes = [sum(part.num_bytes for part in item.parts) for item in items]
  assert max(sizes_bytes) <= 40
  # Greedy: no item could have taken the first part of the next one.
  for size_bytes, following in zip(sizes_bytes, items[1:], strict=False):
    assert size_bytes + following.parts[0].num_bytes > 40


def test_items_are_read_one_at_a_time(tmp_path, small_items):
  # No more than an item's bytes are read ahead of what is on the disk.
  state = _State(1)
  pending = {"bytes": 0, "items": 0, "most": 0}
  read = state.read

  def counting_read(leaf_index, kind, start, stop):
    partial = tmp_path / "step_00000010.partial" / "items"
    num_items = len(list(partial.iterdir()))
    if num_items != pending["items"]:
      pending.update(items=num_items, bytes=0)
    pending["bytes"] += 4 * (stop - start)
    pending["most"] = max(pending["most"], pending["bytes"])
    return read(leaf_index, kind, start, stop)

  state.read = counting_read
  checkpoint.save(tmp_path, state)
  assert pending["items"] > 10
  assert 0 < pending["most"] <= 256


def test_orbax_alone_reads_the_arrays(tmp_path, small_items):
  saved = _State(1)
  path = checkpoint.save(tmp_path, saved)
  content = json.loads((path / "manifest.json").read_text())["content"]
  index_of = {leaf.name: i for i, leaf in enumerate(saved.leaves)}
  with ocp.PyTreeCheckpointer() as checkpointer:
    for index, item in enumerate(content["items"]):
      tree = checkpointer.restore(path / "items" / f"{index:05d}")
      assert len(tree) == len(item["parts"])
      for i, part in enumerate(item["parts"]):
        if part["kind"] != "other":
          whole = saved.arrays[index_of[part["name"]], part["kind"]]
          wanted = whole[part["start"] : part["stop"]]
          assert np.asarray(tree[str(i)]).tobytes() == wanted.tobytes()


def test_the_manifest_lists_leaves_ranges_and_checksums(tmp_path, small_items):
  saved = _State(1)
  path = checkpoint.save(tmp_path, saved)
  content = json.loads((path / "manifest.json").read_text())["content"]
  assert (content["format"], content["step"]) == (1, 10)
  assert content["scalars"] == saved.scalars()
  assert content["leaves"] == [
    {"name": x.name, "shape": list(x.shape), "trained": x.trained}
    for x in saved.leaves
  ]
  index_of = {leaf.name: i for i, leaf in enumerate(saved.leaves)}
  num_elems = 0
  for part in (part for item in content["items"] for part in item["parts"]):
    if part["kind"] != "other":
      whole = saved.arrays[index_of[part["name"]], part["kind"]]
      stored = whole[part["start"] : part["stop"]]
      num_elems += stored.size
      assert part["dtype"] == "float32"
      assert part["crc32"] == zlib.crc32(stored.tobytes())
  assert num_elems == sum(array.size for array in saved.arrays.values())


def test_saving_prints_nothing_and_leaves_no_thread(tmp_path, capfd, caplog):
  before = threading.active_count()
  checkpoint.save(tmp_path, _State(1))
  checkpoint.restore(tmp_path, _State(2))
  assert threading.active_count() == before
  assert capfd.readouterr() == ("", "")
  assert [r for r in caplog.records if r.levelname != "INFO"] == []


# --- damage


def _refused(path, match):
  """Restores into a state, which must refuse and stay as it is."""
  state = _State(2)
  before = state.snapshot()
  with pytest.raises(checkpoint.CheckpointError, match=match) as caught:
    checkpoint.restore(path, state)
  assert str(path) in str(caught.value)
  assert state.snapshot() == before
  return str(caught.value)


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_to_any_file_is_refused(tmp_path, monkeypatch, damage):
  # Every file, the last ones too: a reader that loads while it verifies would
  # have overwritten most of the state by then.
  monkeypatch.setattr(array_store, "ITEM_BYTES", 2048)
  saved = _State(1)
  path = checkpoint.save(tmp_path, saved)
  rng = np.random.default_rng(0)
  reasons = {
    "flipped": "is damaged: its CRC-32",
    "truncated": r"has \d+ bytes, not|manifest.json is damaged",
    "missing": "is missing",
  }
  files = _files(path)
  assert len(list((path / "items").iterdir())) == 3
  for file in files:
    content = file.read_bytes()
    for _ in range(1 if damage == "missing" else 3):
      at = int(rng.integers(len(content)))
      if file.name == "manifest.json" and damage == "flipped":
        continue  # see test_a_changed_manifest_is_refused
      if damage == "missing":
        file.unlink()
      elif damage == "truncated":
        file.write_bytes(content[:at])
      else:
        flipped = bytes([content[at] ^ (1 << int(rng.integers(8)))])
        file.write_bytes(content[:at] + flipped + content[at + 1 :])
      assert str(file) in _refused(path, reasons[damage])
      file.write_bytes(content)
  restored = _State(2)
  checkpoint.restore(path, restored)
  assert restored.snapshot() == saved.snapshot()


def test_a_flipped_bit_of_the_manifest_is_refused_or_harmless(tmp_path):
  # White space does not count: refused with the state untouched, or restored
  # bit by bit.
  saved = _State(1)
  user_state = {"position": [1.5, True, None], "note": "a b"}
  path = checkpoint.save(tmp_path, saved, user_state=user_state)
  manifest = path / "manifest.json"
  content = manifest.read_bytes()
  rng = np.random.default_rng(0)
  num_refused = 0
  for at in rng.integers(len(content), size=200):
    flipped = bytearray(content)
    flipped[at] ^= 1 << int(rng.integers(8))
    manifest.write_bytes(flipped)
    state = _State(2)
    before = state.snapshot()
    try:
      assert checkpoint.restore(path, state) == user_state
      assert state.snapshot() == saved.snapshot(), at
    except checkpoint.CheckpointError as error:
      assert str(path) in str(error)
      assert state.snapshot() == before, at
      num_refused += 1
  assert num_refused > 50


def test_an_array_that_was_stored_wrongly_is_refused(tmp_path, small_items):
  # The files are as they were written, but not what was in memory.
  path = checkpoint.save(tmp_path, _State(1))

  def change(content):
    content["items"][-2]["parts"][0]["crc32"] ^= 1

  _rewrite_manifest(path, change)
  _refused(path, r"00\d+: \w+ of '.*' \[\d+:\d+\] is damaged: its CRC-32")


@pytest.mark.parametrize(
  ("change", "match"),
  [
    ({"stop": 63, "start": -1}, "out of order"),
    ({"dtype": "int32"}, "is not an array of 64 elements of int32"),
  ],
)
def test_a_part_of_another_form_is_refused(
  tmp_path, small_items, change, match
):
  path = checkpoint.save(tmp_path, _State(1))
  _rewrite_manifest(path, lambda c: c["items"][0]["parts"][0].update(change))
  _refused(path, match)


def test_a_missing_item_is_refused(tmp_path, small_items):
  path = checkpoint.save(tmp_path, _State(1))
  shutil.rmtree(path / "items" / "00003")
  assert "items/00003/" in _refused(path, "is missing")


def test_swapped_items_are_refused(tmp_path, small_items):
  path = checkpoint.save(tmp_path, _State(1))
  items = path / "items"
  os.rename(items / "00000", items / "x")
  os.rename(items / "00001", items / "00000")
  os.rename(items / "x", items / "00001")
  _refused(path, r"is missing|is damaged|has \d+ bytes")


def test_a_checkpoint_without_manifest_is_refused_and_passed_over(tmp_path):
  earlier = _State(1, num_steps=9)
  checkpoint.save(tmp_path, earlier)
  path = checkpoint.save(tmp_path, _State(2, num_steps=10))
  (path / "manifest.json").unlink()
  _refused(path, "manifest.json is missing")
  restored = _State(3)
  checkpoint.restore(tmp_path, restored)
  assert restored.snapshot() == earlier.snapshot()


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ('"count": 1', '"count": 2'),
    ('"position": 7', '"position": 8'),
    ('"start": 0', '"start": 1'),
    ('"content"', '"kontent"'),
    ("{", ""),
  ],
)
def test_a_changed_manifest_is_refused(tmp_path, old, new):
  path = checkpoint.save(tmp_path, _State(1), user_state={"position": 7})
  manifest = path / "manifest.json"
  text = manifest.read_text()
  assert old in text
  manifest.write_text(text.replace(old, new, 1))
  _refused(path, "manifest.json is damaged")


def _rewrite_manifest(path, change):
  """Changes the manifest and makes its checksum fit: another writer's."""
  content = json.loads((path / "manifest.json").read_text())["content"]
  change(content)
  checkpoint._write_manifest(path, content)


def test_another_format_is_refused(tmp_path):
  path = checkpoint.save(tmp_path, _State(1))
  _rewrite_manifest(path, lambda content: content.update(format=2))
  _refused(path, "has format 2, this version reads 1")


@pytest.mark.parametrize(
  ("change", "match"),
  [
    (lambda items: items[0]["parts"].pop(), "out of order|of the .* elements"),
    (lambda items: items.pop(), "lists .* of the .* elements"),
    (lambda items: items.append(items[0]), "out of order"),
    (lambda items: items.reverse(), "out of order"),
  ],
)
def test_a_manifest_that_does_not_cover_the_leaves_is_refused(
  tmp_path, small_items, change, match
):
  path = checkpoint.save(tmp_path, _State(1))
  _rewrite_manifest(path, lambda content: change(content["items"]))
  _refused(path, match)


def test_damage_during_the_load_is_reported_as_such(tmp_path, small_items):
  path = checkpoint.save(tmp_path, _State(1))
  state = _State(2)
  write = state.write

  def write_and_damage(*args):
    write(*args)
    shutil.rmtree(path / "items" / "00002", ignore_errors=True)

  state.write = write_and_damage
  with pytest.raises(checkpoint.CheckpointError, match="partly overwritten"):
    checkpoint.restore(path, state)


# --- another model


@pytest.mark.parametrize(
  ("change", "reason"),
  [
    (
      {"block_0.norm.scale": (4, 2)},
      r"'block_0.norm.scale' is shape=\[8\] trained=True in the checkpoint"
      r" and shape=\[4, 2\] trained=True in the model",
    ),
    ({"block_1.extra": (3,)}, "'block_1.extra' is absent in the checkpoint"),
    ({"head.zeros": None}, r"'head.zeros' is .* and absent in the model"),
    # Two differ: the first is named.
    (
      {"head.bias": (1,), "embed.table": (8, 37)},
      r"'embed.table' is shape=\[37, 8\]",
    ),
  ],
)
def test_another_model_is_refused_by_its_first_leaf(tmp_path, change, reason):
  path = checkpoint.save(tmp_path, _State(1))
  shapes = {k: v for k, v in (_SHAPES | change).items() if v is not None}
  state = _State(2, shapes=shapes)
  before = state.snapshot()
  with pytest.raises(checkpoint.CheckpointError, match=reason) as caught:
    checkpoint.restore(path, state)
  assert str(path) in str(caught.value)
  assert state.snapshot() == before


def test_other_trained_leaves_are_refused(tmp_path):
  path = checkpoint.save(tmp_path, _State(1))
  shapes = {k.replace("frozen", "thawed"): v for k, v in _SHAPES.items()}
  state = _State(2, shapes=shapes)
  state.leaves = tuple(
    _Leaf(leaf.name.replace("thawed", "frozen"), leaf.shape)
    for leaf in state.leaves
  )
  with pytest.raises(
    checkpoint.CheckpointError,
    match="'block_0.frozen' is .*trained=False in the checkpoint",
  ):
    checkpoint.restore(path, state)


@pytest.mark.parametrize("what", ["shape", "dtype", "absent"])
def test_other_non_param_state_is_refused(tmp_path, what):
  path = checkpoint.save(tmp_path, _State(1))
  state = _State(2)
  key = state.other_arrays.pop("dropout.key")
  if what != "absent":
    changed = key[:1] if what == "shape" else key.astype(np.int32)
    state.other_arrays["dropout.key"] = changed
  before = state.snapshot()
  with pytest.raises(checkpoint.CheckpointError, match="'dropout.key' is"):
    checkpoint.restore(path, state)
  assert state.snapshot() == before


def test_other_scalars_are_refused(tmp_path):
  path = checkpoint.save(tmp_path, _State(1))
  state = _State(2)
  state.scalar_values["loss_scale"] = 1.0
  before = state.snapshot()
  with pytest.raises(checkpoint.CheckpointError, match="loss_scale"):
    checkpoint.restore(path, state)
  assert state.snapshot() == before


def test_the_order_of_leaves_does_not_matter(tmp_path, small_items):
  saved = _State(1)
  path = checkpoint.save(tmp_path, saved)
  shapes = dict(reversed(_SHAPES.items()))
  restored = _State(2, shapes=shapes)
  checkpoint.restore(path, restored)
  for index, leaf in enumerate(saved.leaves):
    for kind in ("master", "mu", "nu") if leaf.trained else ("master",):
      array = restored.arrays[len(shapes) - 1 - index, kind]
      assert array.tobytes() == saved.arrays[index, kind].tobytes()


# --- arguments


@pytest.mark.parametrize(
  ("user_state", "reason"),
  [
    ({"a": {1: 2}}, r"user_state\['a'\] has the key 1; use str keys"),
    ({"a": [0, (1, 2)]}, r"user_state\['a'\]\[1\] is of type tuple"),
    ({"x": np.float32(1)}, r"user_state\['x'\] is of type float32"),
  ],
)
def test_what_json_would_change_is_refused(tmp_path, user_state, reason):
  with pytest.raises(ValueError, match=reason):
    checkpoint.save(tmp_path / "run", _State(1), user_state=user_state)
  assert not (tmp_path / "run").exists()


def test_a_place_without_checkpoint_says_so(tmp_path):
  state = _State(2)
  before = state.snapshot()
  (tmp_path / "step_00000011.partial").mkdir()
  (tmp_path / "step_00000012").mkdir()
  with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
    checkpoint.restore(tmp_path, state)
  with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
    checkpoint.latest(tmp_path / "nowhere")
  with pytest.raises(FileNotFoundError, match="step_00000013 is no directory"):
    checkpoint.restore(tmp_path / "step_00000013", state)
  assert state.snapshot() == before


# --- saves that replace, fail or die


def test_the_same_step_is_replaced(tmp_path):
  checkpoint.save(tmp_path, _State(1))
  saved = _State(2)
  checkpoint.save(tmp_path, saved)
  assert os.listdir(tmp_path) == ["step_00000010"]
  restored = _State(3)
  checkpoint.restore(tmp_path, restored)
  assert restored.snapshot() == saved.snapshot()


def test_a_failed_save_leaves_the_earlier_checkpoint_alone(tmp_path):
  earlier = _State(1)
  checkpoint.save(tmp_path, earlier)
  failing = _State(2)

  def fail(*args):
    raise OSError("no space")

  failing.read = fail
  with pytest.raises(OSError, match="no space"):
    checkpoint.save(tmp_path, failing)
  assert os.listdir(tmp_path) == ["step_00000010"]
  restored = _State(3)
  checkpoint.restore(tmp_path, restored)
  assert restored.snapshot() == earlier.snapshot()


def test_keep_leaves_the_new_one_and_the_highest_steps(tmp_path):
  for num_steps in (5, 6, 7, 8):
    checkpoint.save(tmp_path, _State(1, num_steps=num_steps))
  checkpoint.save(tmp_path, _State(1, num_steps=9), keep=6)
  assert len(os.listdir(tmp_path)) == 5
  checkpoint.save(tmp_path, _State(1, num_steps=9), keep=3)
  names = ["step_00000007", "step_00000008", "step_00000009"]
  assert sorted(os.listdir(tmp_path)) == names
  # Going back to an earlier step never removes what was just written.
  checkpoint.save(tmp_path, _State(1, num_steps=6), keep=1)
  assert os.listdir(tmp_path) == ["step_00000006"]
  with pytest.raises(ValueError, match="keep=0 would leave no checkpoint"):
    checkpoint.save(tmp_path, _State(1, num_steps=7), keep=0)


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
  # Oracle: the tree as it is at the moment of the rename.
  calls = []
  fsync, rename = os.fsync, os.rename

  def recording_fsync(descriptor):
    fsync(descriptor)
    calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

  def recording_rename(source, target):
    calls.append("rename")
    tree.update([Path(source), *Path(source).rglob("*")])
    rename(source, target)

  tree = set()
  monkeypatch.setattr(os, "fsync", recording_fsync)
  monkeypatch.setattr(os, "rename", recording_rename)
  checkpoint.save(tmp_path, _State(1))
  renamed = calls.index("rename")
  assert len(tree) > 5
  assert set(calls[:renamed]) == tree
  assert calls[renamed:] == ["rename", tmp_path]


def _run_child(call):
  """Starts a Python process that calls something of this module."""
  here = Path(__file__).parent
  path = os.pathsep.join([str(here.parent), str(here)])
  return subprocess.Popen(
    [sys.executable, "-c", f"import test_checkpoint; test_checkpoint.{call}"],
    env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE,
  )


def save_until(directory, num_steps, event, path):
  """Saves state 2 and stops for good before an event (runs in a child).

  Args:
    directory: the run's directory.
    num_steps: the step to save.
    event: "read", or the name of one of Python's audit events.
    path: end of the event's path.
  """

  def stop():
    os.write(1, b"!")
    signal.pause()

  def hook(name, args):
    if name == event and str(args[0]).endswith(path):
      stop()

  array_store.ITEM_BYTES = 256
  state = _State(2, num_steps=num_steps)
  read = state.read

  def read_or_stop(leaf_index, kind, start, stop_elem):
    if event == "read" and (leaf_index, kind, start) == (0, "nu", 64):
      stop()
    return read(leaf_index, kind, start, stop_elem)

  state.read = read_or_stop
  sys.addaudithook(hook)
  checkpoint.save(directory, state)


@pytest.mark.parametrize(
  ("num_steps", "event", "path", "seed", "name"),
  [
    (11, "read", "", 1, "step_00000010"),
    (11, "open", "manifest.json", 1, "step_00000010"),
    (11, "os.rename", "step_00000011.partial", 1, "step_00000010"),
    (10, "os.rename", "step_00000010", 1, "step_00000010"),
    (10, "os.rename", "step_00000010.partial", 1, "step_00000010.replaced"),
    (10, "shutil.rmtree", "step_00000010.replaced", 2, "step_00000010"),
  ],
)
def test_a_killed_save_leaves_a_complete_checkpoint(
  tmp_path, num_steps, event, path, seed, name
):
  # The child reports that it has come to the event and stays there, so that
  # SIGKILL always hits the same place.
  checkpoint.save(tmp_path, _State(1))
  call = f"save_until({str(tmp_path)!r}, {num_steps}, {event!r}, {path!r})"
  with _run_child(call) as child:
    assert child.stdout.read(1) == b"!"
    child.kill()
  assert child.returncode == -signal.SIGKILL
  assert checkpoint.latest(tmp_path).name == name
  restored = _State(3)
  checkpoint.restore(tmp_path, restored)
  assert restored.snapshot() == _State(seed).snapshot()

  # The next save clears up and keeps what was complete.
  checkpoint.save(tmp_path, _State(4, num_steps=12))
  assert sorted(os.listdir(tmp_path)) == ["step_00000010", "step_00000012"]
  checkpoint.restore(tmp_path / "step_00000010", restored)
  assert restored.snapshot() == _State(seed).snapshot()


class _VastState(_State):
  """Makes its elements up as they are read, so that it takes no memory."""

  def read(self, leaf_index, kind, start, stop):
    first = start + 2**28 * (1 + ("master", "mu", "nu").index(kind))
    return np.arange(first, first + stop - start, dtype=np.int32).view(
      np.float32
    )

  def write(self, leaf_index, kind, start, values):
    wanted = self.read(leaf_index, kind, start, start + len(values))
    if not np.array_equal(values.view(np.int32), wanted.view(np.int32)):
      raise AssertionError(f"{kind} from {start} on is not what was saved")


def measure_memory(directory):
  """Prints the peak RSS in bytes before, after save and after restore."""

  def peak_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
      if line.startswith("VmHWM:"):
        return 1024 * int(line.split()[1])

  checkpoint.save(directory, _State(1))
  checkpoint.restore(directory, _State(2))
  state = _VastState(1, num_steps=11, shapes={})
  # 1.5 GiB in all.
  state.leaves = (_Leaf("vast", (2**17, 2**10)),)
  peaks_bytes = [peak_bytes()]
  checkpoint.save(directory, state)
  peaks_bytes.append(peak_bytes())
  checkpoint.restore(directory, state)
  peaks_bytes.append(peak_bytes())
  print(json.dumps(peaks_bytes))


@pytest.mark.slow
def test_saving_and_restoring_take_at_most_a_gibibyte_more(tmp_path):
  with _run_child(f"measure_memory({str(tmp_path)!r})") as child:
    output = child.stdout.read()
  assert child.returncode == 0
  before_bytes, saved_bytes, restored_bytes = json.loads(output)
  assert saved_bytes - before_bytes <= 2**30
  assert restored_bytes - before_bytes <= 2**30
