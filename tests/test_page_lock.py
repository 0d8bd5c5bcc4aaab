"""Page-locking, with a library that records its calls instead of CUDA's."""

import ctypes
import gc
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from sojax.host import page_lock
from sojax.host.arena import Arena
from sojax.host.kernels import Pool

CXX = (sysconfig.get_config_var("CXX") or "c++").split()[0]
HUGE_PAGE = 2 << 20
SOURCE = r"""
#include <sys/mman.h>
#include <cstddef>
extern "C" {
int fault = 0;
// What, address, bytes, flags; of the last 16 calls.
std::size_t calls[64];
std::size_t num_calls = 0;

static void Record(std::size_t what, void* p, std::size_t n, std::size_t f) {
  std::size_t* call = calls + 4 * (num_calls++ % 16);
  call[0] = what;
  call[1] = reinterpret_cast<std::size_t>(p);
  call[2] = n;
  call[3] = f;
}

int cudaHostRegister(void* p, std::size_t num_bytes, unsigned flags) {
  Record(1, p, num_bytes, flags);
  return fault;
}

// In place of flags: whether the memory is still mapped.
int cudaHostUnregister(void* p) {
  unsigned char resident;
  Record(2, p, 0, mincore(p, 1, &resident) == 0);
  return fault;
}

const char* cudaGetErrorString(int code) {
  return code == 2 ? "out of luck" : "no such error";
}
}
"""


@pytest.fixture(scope="module")
def library_path(tmp_path_factory):
  folder = tmp_path_factory.mktemp("cudart")
  source, library = folder / "fake.cc", folder / "libcudart.so.12"
  source.write_text(SOURCE)
  command = [CXX, "-shared", "-fPIC", str(source), "-o", str(library)]
  subprocess.run(command, check=True)
  return library


class Recorded:
  """The variables of the library."""

  def __init__(self, path):
    library = ctypes.CDLL(str(path))
    self._fault = ctypes.c_int.in_dll(library, "fault")
    self._calls = (ctypes.c_size_t * 64).in_dll(library, "calls")
    self._num_calls = ctypes.c_size_t.in_dll(library, "num_calls")
    self.fail_with(0)
    self._num_calls.value = 0

  def fail_with(self, code):
    self._fault.value = code

  def calls(self):
    return [
      tuple(self._calls[4 * i : 4 * i + 4])
      for i in range(self._num_calls.value)
    ]


@pytest.fixture
def recorded(library_path, monkeypatch):
  monkeypatch.setattr(page_lock, "_NAMES", ("libno-a.so", str(library_path)))
  yield Recorded(library_path)
  gc.collect()


def test_a_block_is_locked_as_a_whole_until_its_last_array_is_gone(recorded):
  arena = Arena(3 * HUGE_PAGE + 5, page_locked=True)
  arena.empty(10, np.float32)
  array = arena.empty(100, np.float32)
  address = arena._block.ctypes.data
  lock = (1, address, 3 * HUGE_PAGE + 5, 1)
  assert recorded.calls() == [lock]
  part = np.split(array.reshape(10, 10).view(np.int16), 2)[1]
  view = memoryview(part)
  del arena
  gc.collect()
  assert recorded.calls() == [lock]
  del array, part
  gc.collect()
  assert recorded.calls() == [lock]
  del view
  gc.collect()
  assert recorded.calls() == [lock, (2, address, 0, 1)]


def test_an_arena_that_is_kept_keeps_its_pages_locked(recorded):
  arena = Arena(HUGE_PAGE, page_locked=True)
  arena.empty(10, np.float32)
  gc.collect()
  assert len(recorded.calls()) == 1
  del arena
  gc.collect()
  assert len(recorded.calls()) == 2


def test_no_pages_are_locked_unless_asked_or_of_nothing(recorded):
  Arena(HUGE_PAGE)
  Arena(0, page_locked=True)
  gc.collect()
  assert recorded.calls() == []


def test_pages_are_touched_by_the_pool_before_they_are_locked(
  recorded, monkeypatch
):
  order = []
  lock = page_lock.CudaRuntime.lock
  monkeypatch.setattr(
    page_lock.CudaRuntime,
    "lock",
    lambda *args: (order.append("lock"), lock(*args)),
  )
  with Pool(2) as pool:
    zero = pool.zero
    monkeypatch.setattr(
      pool, "zero", lambda arrays: (order.append("zero"), zero(arrays))
    )
    Arena(HUGE_PAGE, page_locked=True, pool=pool)
  assert order == ["zero", "lock"]


def test_what_cuda_refuses_is_an_error_with_its_words(recorded):
  recorded.fail_with(2)
  match = f"cudaHostRegister of {HUGE_PAGE} bytes failed .* 2: out of luck"
  with pytest.raises(RuntimeError, match=match):
    Arena(HUGE_PAGE, page_locked=True)
  gc.collect()
  assert len(recorded.calls()) == 1  # what was not locked is not unlocked


def test_pages_that_cannot_be_unlocked_are_reported(recorded, monkeypatch):
  reports = []
  monkeypatch.setattr(
    sys, "unraisablehook", lambda x: reports.append(str(x.exc_value))
  )
  arena = Arena(HUGE_PAGE, page_locked=True)
  recorded.fail_with(2)
  del arena
  gc.collect()
  assert reports == ["cudaHostUnregister failed with error 2: out of luck"]


def test_a_missing_runtime_is_an_error_that_says_what_was_tried(monkeypatch):
  monkeypatch.setattr(page_lock, "_NAMES", ("libno-a.so", "libno-b.so"))
  monkeypatch.setattr(page_lock, "_in_pip_packages", list)
  match = "page_locked=True needs .*libno-a.so: .*libno-b.so: .*=False"
  with pytest.raises(ValueError, match=match):
    Arena(HUGE_PAGE, page_locked=True)


@pytest.mark.parametrize("package", ["cuda_runtime", "cu13"])
def test_the_runtime_is_found_among_the_packages_of_pip(
  package, library_path, tmp_path, monkeypatch
):
  folder = tmp_path / "nvidia" / package / "lib"
  folder.mkdir(parents=True)
  installed = folder / library_path.name
  installed.write_bytes(library_path.read_bytes())
  monkeypatch.setattr(page_lock, "_NAMES", ())
  monkeypatch.setattr(sys, "path", [str(tmp_path)])
  recorded = Recorded(installed)
  Arena(HUGE_PAGE, page_locked=True)
  gc.collect()
  assert [call[0] for call in recorded.calls()] == [1, 2]


def test_without_packages_of_nvidia_there_is_none_among_them(monkeypatch):
  monkeypatch.setattr(sys, "path", [])
  assert page_lock._in_pip_packages() == []
