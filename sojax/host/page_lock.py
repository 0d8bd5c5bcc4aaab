"""Page-locked memory by the CUDA runtime, where that can be loaded.

Not verified on a GPU: the tests run it with a library that only records calls.
"""

import ctypes
import importlib.util
from pathlib import Path

_NAMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
# Page-locked for the contexts of all devices, not of the current one only.
_PORTABLE = 1


class CudaRuntime:
  """The functions of libcudart that lock pages and unlock them."""

  def __init__(self):
    """Loads the library, by preference the one that is loaded already.

    Raises:
      ValueError: if there is none.
    """
    self._library = _load()
    self._library.cudaHostRegister.argtypes = [
      ctypes.c_void_p,
      ctypes.c_size_t,
      ctypes.c_uint,
    ]
    self._library.cudaHostUnregister.argtypes = [ctypes.c_void_p]
    self._library.cudaGetErrorString.restype = ctypes.c_char_p

  def lock(self, address: int, num_bytes: int) -> None:
    """Keeps pages in RAM, where devices read and write them by themselves.

    Makes CUDA's context of the current device, if it has none yet. Pages that
    are not in RAM are brought there by the calling thread.

    Args:
      address: start of the memory.
      num_bytes: its size, at least 1.

    Raises:
      RuntimeError: if CUDA refuses.
    """
    self._check(
      self._library.cudaHostRegister(address, num_bytes, _PORTABLE),
      f"cudaHostRegister of {num_bytes} bytes",
    )

  def unlock(self, address: int) -> None:
    """Takes a `lock` back; must come before the memory is given back.

    Args:
      address: start of the memory.

    Raises:
      RuntimeError: if CUDA refuses.
    """
    self._check(self._library.cudaHostUnregister(address), "cudaHostUnregister")

  def _check(self, code: int, what: str) -> None:
    if code:
      message = self._library.cudaGetErrorString(code).decode()
      raise RuntimeError(f"{what} failed with error {code}: {message}")


def _load() -> ctypes.CDLL:
  faults = []
  for name in (*_NAMES, *_in_pip_packages()):
    try:
      return ctypes.CDLL(name)
    except OSError as error:
      faults.append(str(error))
  raise ValueError(
    "page_locked=True needs the CUDA runtime, which cannot be loaded"
    f" ({'; '.join(faults)}); install it (NVIDIA's toolkit, or its packages for"
    " pip), or use page_locked=False"
  )


def _in_pip_packages() -> list[str]:
  """Returns the paths of the libraries that NVIDIA's packages have installed.

  They are in nvidia/cuda_runtime/lib up to CUDA 12, and nvidia/cu13/lib then.
  """
  spec = importlib.util.find_spec("nvidia")
  folders = (spec and spec.submodule_search_locations) or ()
  return [
    str(path)
    for folder in folders
    for path in sorted(Path(folder).glob("*/lib/libcudart.so*"), reverse=True)
  ]
