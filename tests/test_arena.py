"""The arena: oracles are its documented layout and /proc/self/smaps."""

import gc
import itertools
import pathlib
import re
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojax.host.arena import Arena
from sojax.host.kernels import Pool
from tests.training import batches, trainer

PAGE = 4096
HUGE_PAGE = 2 << 20


def test_the_first_array_starts_a_huge_page():
  for _ in range(3):
    array = Arena(100).empty(25, np.float32)
    assert array.ctypes.data % HUGE_PAGE == 0


@given(
  sizes=st.lists(
    st.tuples(
      st.integers(0, 3 * PAGE),
      st.sampled_from([np.float32, np.int16, ml_dtypes.bfloat16, np.uint8]),
    ),
    max_size=12,
  )
)
def test_arrays_are_disjoint_aligned_and_skewed(sizes):
  sizes = [(n, np.dtype(dtype)) for n, dtype in sizes]
  num_bytes = [n * dtype.itemsize for n, dtype in sizes]
  arena = Arena(Arena.bytes_for(num_bytes))
  arrays = [arena.empty(n, dtype) for n, dtype in sizes]
  assert arena.used_bytes == arena.capacity_bytes
  for i, (array, (n, dtype)) in enumerate(zip(arrays, sizes, strict=True)):
    assert array.shape == (n,) and array.dtype == dtype
    assert array.flags.writeable and array.flags.c_contiguous
    assert not array.view(np.uint8).any()
    assert array.ctypes.data % 64 == 0
    if n:
      assert array.ctypes.data % PAGE == i * 1088 % PAGE
    array.view(np.uint8)[:] = i + 1
  # Had two arrays shared a byte, the later would have overwritten it.
  for i, array in enumerate(arrays):
    assert np.all(array.view(np.uint8) == i + 1)


def test_an_exhausted_arena_is_an_error_and_stays_usable():
  arena = Arena(1000)
  with pytest.raises(ValueError, match="251 float32 .* arena of 1000"):
    arena.empty(251, np.float32)
  assert arena.used_bytes == 0
  assert arena.empty(250, np.float32).size == 250
  assert arena.used_bytes == 1000
  with pytest.raises(ValueError, match="raise capacity_bytes"):
    arena.empty(1, np.uint8)


@pytest.mark.parametrize("capacity_bytes", [-1, -HUGE_PAGE])
def test_a_negative_capacity_is_an_error(capacity_bytes):
  with pytest.raises(ValueError, match=f"capacity_bytes={capacity_bytes}"):
    Arena(capacity_bytes)


def test_a_negative_length_is_an_error():
  with pytest.raises(ValueError, match="num_elems=-1"):
    Arena(100).empty(-1, np.float32)


def test_nothing_needs_nothing():
  assert Arena.bytes_for([]) == 0
  assert Arena(0).empty(0, np.float32).size == 0


def _mapping(address):
  """The entry of /proc/self/smaps that holds the address, or None."""
  text = pathlib.Path("/proc/self/smaps").read_text()
  starts = [m.start() for m in re.finditer(r"^[0-9a-f]+-", text, re.M)]
  for start, stop in itertools.pairwise([*starts, len(text)]):
    first, last = re.match(r"(\w+)-(\w+)", text[start:]).groups()
    if int(first, 16) <= address < int(last, 16):
      return text[start:stop]
  return None


def test_memory_is_private_advised_to_be_huge_and_not_yet_resident():
  arena = Arena(64 * HUGE_PAGE)
  array = arena.empty(64 * HUGE_PAGE, np.uint8)
  entry = _mapping(array.ctypes.data)
  assert " rw-p " in entry
  flags = re.search(r"VmFlags: (.*)", entry)[1].split()
  assert "hg" in flags
  assert int(re.search(r"Rss: +(\d+) kB", entry)[1]) * 1024 <= HUGE_PAGE


def resident_bytes(array):
  """Bytes in RAM of the mapping that the array lies in."""
  rss = re.search(r"Rss: +(\d+) kB", _mapping(array.ctypes.data))[1]
  return int(rss) * 1024


def num_faults():
  """Page faults so far by threads of pools, and by this one."""
  of_pools = 0
  for task in pathlib.Path("/proc/self/task").iterdir():
    name, _, fields = (task / "stat").read_text().rpartition(")")
    faults = int(fields.split()[7])
    if "(sojax-" in name:
      of_pools += faults
    elif int(task.name) == threading.get_native_id():
      own = faults
  return of_pools, own


def test_a_pool_brings_all_pages_into_memory_by_its_threads():
  num_pages = 100
  with Pool(2) as pool:
    of_pool, own = num_faults()
    arena = Arena(num_pages * HUGE_PAGE - 7, pool=pool)
    of_pool, own = (
      x - y for x, y in zip(num_faults(), (of_pool, own), strict=True)
    )
  array = arena.empty(num_pages * HUGE_PAGE - 7, np.uint8)
  assert resident_bytes(array) >= array.nbytes
  assert not array.any()
  # At most as many of this thread's are of what else it does.
  assert of_pool >= num_pages > own


def test_a_closed_pool_is_an_error():
  pool = Pool(1)
  pool.close()
  with pytest.raises(ValueError, match="this pool is closed"):
    Arena(100, pool=pool)


@pytest.mark.parametrize("plan", [{}, {"accumulate": "host"}], ids=str)
def test_host_buckets_and_sums_are_in_memory_before_the_first_step(
  plan, arenas
):
  with trainer(plan, accumulation=2) as ours:
    assert len(arenas) == 1 + len(plan)
    before = [resident_bytes(arena._block) for arena in arenas]
    for arena, num_bytes in zip(arenas, before, strict=True):
      assert num_bytes >= arena.capacity_bytes > 0
    for batch in batches(2, rows=8):
      ours.step(batch)
    ours.drain()
    assert before == [resident_bytes(arena._block) for arena in arenas]


def test_the_memory_lives_as_long_as_an_array():
  arena = Arena(8 * HUGE_PAGE)
  array = arena.empty(4 * HUGE_PAGE, np.uint8)
  address = array.ctypes.data
  part = array[5:10]
  part[:] = 7
  del arena, array
  gc.collect()
  assert np.all(part == 7)
  assert _mapping(address) is not None
  del part
  gc.collect()
  entry = _mapping(address)
  assert entry is None or "hg" not in entry.split("VmFlags:")[1].split()
