"""Checkpoints against a stand-in state made of plain NumPy arrays.

The oracle is the stand-in's own bytes: every element of every array, compared
as bytes, so that NaN payloads and signs of zero count.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from sojax import array_store, checkpoint
from tests.checkpoint_cases import (
  FakeLeaf,
  FakeState,
)


def test_every_bit_survives(tmp_path):
  saved = FakeState(1)
  user_state = {"position": [1, 2**70], "rate": 0.1, "none": None, "on": True}
  path = checkpoint.save(tmp_path / "run", saved, user_state=user_state)
  assert path == tmp_path / "run" / "step_00000010"
  restored = FakeState(2, num_steps=0)
  assert restored.snapshot() != saved.snapshot()
  assert checkpoint.restore(path, restored) == user_state
  assert restored.snapshot() == saved.snapshot()


def test_a_run_restores_its_latest_checkpoint(tmp_path):
  states = {n: FakeState(n, num_steps=n) for n in (9, 100000000, 12)}
  for state in states.values():
    checkpoint.save(tmp_path, state)
  assert checkpoint.latest(tmp_path) == tmp_path / "step_100000000"
  restored = FakeState(0)
  assert checkpoint.restore(tmp_path, restored) == {}
  assert restored.snapshot() == states[100000000].snapshot()


def test_any_item_size_restores_any_other(tmp_path, monkeypatch):
  saved = FakeState(1)
  num_items = {}
  for item_bytes in (64, 100, 1000, 2**20):
    monkeypatch.setattr(array_store, "ITEM_BYTES", item_bytes)
    path = checkpoint.save(tmp_path / str(item_bytes), saved)
    num_items[item_bytes] = len(list((path / "items").iterdir()))
    monkeypatch.setattr(array_store, "ITEM_BYTES", 16)
    restored = FakeState(2)
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
  state = FakeState(1)
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
  saved = FakeState(1)
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
  saved = FakeState(1)
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
  checkpoint.save(tmp_path, FakeState(1))
  checkpoint.restore(tmp_path, FakeState(2))
  assert threading.active_count() == before
  assert capfd.readouterr() == ("", "")
  assert [r for r in caplog.records if r.levelname != "INFO"] == []


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
    checkpoint.save(tmp_path / "run", FakeState(1), user_state=user_state)
  assert not (tmp_path / "run").exists()


def test_a_place_without_checkpoint_says_so(tmp_path):
  state = FakeState(2)
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


def test_the_same_step_is_replaced(tmp_path):
  checkpoint.save(tmp_path, FakeState(1))
  saved = FakeState(2)
  checkpoint.save(tmp_path, saved)
  assert os.listdir(tmp_path) == ["step_00000010"]
  restored = FakeState(3)
  checkpoint.restore(tmp_path, restored)
  assert restored.snapshot() == saved.snapshot()


def test_a_failed_save_leaves_the_earlier_checkpoint_alone(tmp_path):
  earlier = FakeState(1)
  checkpoint.save(tmp_path, earlier)
  failing = FakeState(2)

  def fail(*args):
    raise OSError("no space")

  failing.read = fail
  with pytest.raises(OSError, match="no space"):
    checkpoint.save(tmp_path, failing)
  assert os.listdir(tmp_path) == ["step_00000010"]
  restored = FakeState(3)
  checkpoint.restore(tmp_path, restored)
  assert restored.snapshot() == earlier.snapshot()


def test_keep_leaves_the_new_one_and_the_highest_steps(tmp_path):
  for num_steps in (5, 6, 7, 8):
    checkpoint.save(tmp_path, FakeState(1, num_steps=num_steps))
  checkpoint.save(tmp_path, FakeState(1, num_steps=9), keep=6)
  assert len(os.listdir(tmp_path)) == 5
  checkpoint.save(tmp_path, FakeState(1, num_steps=9), keep=3)
  names = ["step_00000007", "step_00000008", "step_00000009"]
  assert sorted(os.listdir(tmp_path)) == names
  # Going back to an earlier step never removes what was just written.
  checkpoint.save(tmp_path, FakeState(1, num_steps=6), keep=1)
  assert os.listdir(tmp_path) == ["step_00000006"]
  with pytest.raises(ValueError, match="keep=0 would leave no checkpoint"):
    checkpoint.save(tmp_path, FakeState(1, num_steps=7), keep=0)


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
  checkpoint.save(tmp_path, FakeState(1))
  renamed = calls.index("rename")
  assert len(tree) > 5
  assert set(calls[:renamed]) == tree
  assert calls[renamed:] == ["rename", tmp_path]


def _run_child(call):
  """Starts a Python process that calls something of this module."""
  here = Path(__file__).parent
  path = os.pathsep.join([str(here.parent), str(here)])
  return subprocess.Popen(
    [
      sys.executable,
      "-c",
      f"from tests import test_checkpoint; test_checkpoint.{call}",
    ],
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
  state = FakeState(2, num_steps=num_steps)
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
  checkpoint.save(tmp_path, FakeState(1))
  call = f"save_until({str(tmp_path)!r}, {num_steps}, {event!r}, {path!r})"
  with _run_child(call) as child:
    assert child.stdout.read(1) == b"!"
    child.kill()
  assert child.returncode == -signal.SIGKILL
  assert checkpoint.latest(tmp_path).name == name
  restored = FakeState(3)
  checkpoint.restore(tmp_path, restored)
  assert restored.snapshot() == FakeState(seed).snapshot()

  # The next save clears up and keeps what was complete.
  checkpoint.save(tmp_path, FakeState(4, num_steps=12))
  assert sorted(os.listdir(tmp_path)) == ["step_00000010", "step_00000012"]
  checkpoint.restore(tmp_path / "step_00000010", restored)
  assert restored.snapshot() == FakeState(seed).snapshot()


class _VastState(FakeState):
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

  checkpoint.save(directory, FakeState(1))
  checkpoint.restore(directory, FakeState(2))
  state = _VastState(1, num_steps=11, shapes={})
  # 1.5 GiB in all.
  state.leaves = (FakeLeaf("vast", (2**17, 2**10)),)
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
