"""Checkpoints that are damaged, or of another model, change nothing."""

import json
import os
import shutil

import numpy as np
import pytest

from sojax import array_store, checkpoint
from tests.checkpoint_cases import (
  SHAPES,
  FakeLeaf,
  FakeState,
  files_of,
)


def _refused(path, match):
  """Restores into a state, which must refuse and stay as it is."""
  state = FakeState(2)
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
  saved = FakeState(1)
  path = checkpoint.save(tmp_path, saved)
  rng = np.random.default_rng(0)
  reasons = {
    "flipped": "is damaged: its CRC-32",
    "truncated": r"has \d+ bytes, not|manifest.json is damaged",
    "missing": "is missing",
  }
  files = files_of(path)
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
  restored = FakeState(2)
  checkpoint.restore(path, restored)
  assert restored.snapshot() == saved.snapshot()


def test_a_flipped_bit_of_the_manifest_is_refused_or_harmless(tmp_path):
  # White space does not count: refused with the state untouched, or restored
  # bit by bit.
  saved = FakeState(1)
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
    state = FakeState(2)
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
  path = checkpoint.save(tmp_path, FakeState(1))

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
  path = checkpoint.save(tmp_path, FakeState(1))
  _rewrite_manifest(path, lambda c: c["items"][0]["parts"][0].update(change))
  _refused(path, match)


def test_a_missing_item_is_refused(tmp_path, small_items):
  path = checkpoint.save(tmp_path, FakeState(1))
  shutil.rmtree(path / "items" / "00003")
  assert "items/00003/" in _refused(path, "is missing")


def test_swapped_items_are_refused(tmp_path, small_items):
  path = checkpoint.save(tmp_path, FakeState(1))
  items = path / "items"
  os.rename(items / "00000", items / "x")
  os.rename(items / "00001", items / "00000")
  os.rename(items / "x", items / "00001")
  _refused(path, r"is missing|is damaged|has \d+ bytes")


def test_a_checkpoint_without_manifest_is_refused_and_passed_over(tmp_path):
  earlier = FakeState(1, num_steps=9)
  checkpoint.save(tmp_path, earlier)
  path = checkpoint.save(tmp_path, FakeState(2, num_steps=10))
  (path / "manifest.json").unlink()
  _refused(path, "manifest.json is missing")
  restored = FakeState(3)
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
  path = checkpoint.save(tmp_path, FakeState(1), user_state={"position": 7})
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
  path = checkpoint.save(tmp_path, FakeState(1))
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
  path = checkpoint.save(tmp_path, FakeState(1))
  _rewrite_manifest(path, lambda content: change(content["items"]))
  _refused(path, match)


def test_damage_during_the_load_is_reported_as_such(tmp_path, small_items):
  path = checkpoint.save(tmp_path, FakeState(1))
  state = FakeState(2)
  write = state.write

  def write_and_damage(*args):
    write(*args)
    shutil.rmtree(path / "items" / "00002", ignore_errors=True)

  state.write = write_and_damage
  with pytest.raises(checkpoint.CheckpointError, match="partly overwritten"):
    checkpoint.restore(path, state)


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
  path = checkpoint.save(tmp_path, FakeState(1))
  shapes = {k: v for k, v in (SHAPES | change).items() if v is not None}
  state = FakeState(2, shapes=shapes)
  before = state.snapshot()
  with pytest.raises(checkpoint.CheckpointError, match=reason) as caught:
    checkpoint.restore(path, state)
  assert str(path) in str(caught.value)
  assert state.snapshot() == before


def test_other_trained_leaves_are_refused(tmp_path):
  path = checkpoint.save(tmp_path, FakeState(1))
  shapes = {k.replace("frozen", "thawed"): v for k, v in SHAPES.items()}
  state = FakeState(2, shapes=shapes)
  state.leaves = tuple(
    FakeLeaf(leaf.name.replace("thawed", "frozen"), leaf.shape)
    for leaf in state.leaves
  )
  with pytest.raises(
    checkpoint.CheckpointError,
    match="'block_0.frozen' is .*trained=False in the checkpoint",
  ):
    checkpoint.restore(path, state)


@pytest.mark.parametrize("what", ["shape", "dtype", "absent"])
def test_other_non_param_state_is_refused(tmp_path, what):
  path = checkpoint.save(tmp_path, FakeState(1))
  state = FakeState(2)
  key = state.other_arrays.pop("dropout.key")
  if what != "absent":
    changed = key[:1] if what == "shape" else key.astype(np.int32)
    state.other_arrays["dropout.key"] = changed
  before = state.snapshot()
  with pytest.raises(checkpoint.CheckpointError, match="'dropout.key' is"):
    checkpoint.restore(path, state)
  assert state.snapshot() == before


def test_other_scalars_are_refused(tmp_path):
  path = checkpoint.save(tmp_path, FakeState(1))
  state = FakeState(2)
  state.scalar_values["loss_scale"] = 1.0
  before = state.snapshot()
  with pytest.raises(checkpoint.CheckpointError, match="loss_scale"):
    checkpoint.restore(path, state)
  assert state.snapshot() == before


def test_the_order_of_leaves_does_not_matter(tmp_path, small_items):
  saved = FakeState(1)
  path = checkpoint.save(tmp_path, saved)
  shapes = dict(reversed(SHAPES.items()))
  restored = FakeState(2, shapes=shapes)
  checkpoint.restore(path, restored)
  for index, leaf in enumerate(saved.leaves):
    for kind in ("master", "mu", "nu") if leaf.trained else ("master",):
      array = restored.arrays[len(shapes) - 1 - index, kind]
      assert array.tobytes() == saved.arrays[index, kind].tobytes()
