"""Contenders that only read and write the arrays of a step: a lower bound.

Those whose name begins with "stream" write what was there. On some machines
that is cheaper than to change it, as a step does; "changing_stream" changes the
last bit of every float.
"""

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from experiments.adam.arrays import Arrays
from experiments.adam.pairing import Contender, State
from experiments.adam.settings import Setting

PREFETCH_BYTES = (0, 1024, 2048, 4096)
_SOURCE = Path(__file__).with_name("stream.cc")
_COMPILE_ARGS = [
  *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread"),
  *("-Wall", "-Wextra", "-Wconversion", "-Werror", "-Wno-psabi"),
]
# The numbers are those of stream.cc.
_STORES = {"ordinary": 0, "nontemporal": 1, "weights_nontemporal": 2}


class Stream:
  """The compiled function.

  Attributes:
    command: how it was compiled.
  """

  def __init__(self):
    """Compiles it, for this machine, with $CXX or c++.

    Raises:
      RuntimeError: if there is no compiler, or it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
      library = Path(folder) / "stream.so"
      self.command = [os.environ.get("CXX", "c++"), *_COMPILE_ARGS]
      try:
        subprocess.run(
          [*self.command, str(_SOURCE), "-o", str(library)],
          check=True,
          capture_output=True,
          text=True,
        )
      except FileNotFoundError as error:
        raise RuntimeError(
          f"{self.command[0]} was not found; install a C++17 compiler or name"
          " one in CXX"
        ) from error
      except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{_SOURCE} failed:\n{error.stderr}") from error
      self._function = ctypes.CDLL(str(library)).StreamArrays
    self._function.restype = None
    self._function.argtypes = [
      *[ctypes.c_void_p] * 5,
      *[ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t],
      *[ctypes.c_int32] * 2,
    ]

  def contenders(
    self, arrays: Arrays, setting: Setting, num_threads: int
  ) -> list[Contender]:
    """Returns all kinds of stores with all distances of prefetches."""
    stores = [
      kind for kind in _STORES if setting.half or not kind.startswith("weights")
    ]
    return [
      self.contender(arrays, setting, num_threads, f"{what}_{kind}_{distance}")
      for what in ("stream", "changing_stream")
      for kind in stores
      for distance in PREFETCH_BYTES
    ]

  def contender(
    self, arrays: Arrays, setting: Setting, num_threads: int, name: str
  ) -> Contender:
    """Returns one of them by its name."""
    what, kind_and_distance = name.split("stream_")
    kind, distance = kind_and_distance.rsplit("_", 1)
    flip = int(what == "changing_")
    weight = setting.weight(arrays)
    args = (
      arrays.p.ctypes.data,
      arrays.mu.ctypes.data,
      arrays.nu.ctypes.data,
      setting.grad(arrays).ctypes.data,
      None if weight is None else weight.ctypes.data,
      arrays.num_params,
      _STORES[kind],
      int(distance),
      num_threads,
      0,
      flip,
    )

    def state() -> State:
      # As it was before the run.
      p, mu, nu = (
        (x.view(np.int32) ^ flip).view(np.float32)
        for x in (arrays.p, arrays.mu, arrays.nu)
      )
      return p, mu, nu, weight

    return Contender(
      name=name,
      run=lambda: self._function(*args),
      state=state,
      steps=False,
    )
