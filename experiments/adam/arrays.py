"""The arrays that all contenders work on, and what memory they lie in."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from sojax.host.arena import Arena
from sojax.host.kernels import CHUNK_ELEMS, Pool
from sojax.host.operations import Narrow
from sojax.host.record import Record
from sojax.host.segments import NarrowSegment
from sojax.plan.records import codes_bytes, num_offsets
from sojax.reference.record import split_float32

_BF16 = np.dtype(ml_dtypes.bfloat16)
# The noise is far longer than a vector and any piece of it is as good as fresh
# numbers, which would take longer than all contenders together.
_NOISE_ELEMS = 1 << 22
_TILE_ELEMS = 1 << 20
_GRAD_SCALE = 1e-2
_ESCAPE_BYTES_PER_PARAM = 0.5


@dataclasses.dataclass(frozen=True)
class Size:
  """An array of the arena.

  Attributes:
    dtype: type of its elements.
    num_elems: length.
  """

  dtype: np.dtype
  num_elems: int


class Arrays:
  """One set of arrays in huge pages, for every contender.

  Attributes:
    num_params: n.
    p: masters, float32 [n].
    mu: first moments, float32 [n].
    nu: second moments, float32 [n].
    grad: gradients, float32 [n].
    grad16: the same gradients rounded, bfloat16 [n].
    weight: working weights, bfloat16 [n].
    p_high: high halves of split masters, bfloat16 [n].
    p_low: their remainders, int16 [n].
    sumsq: sums of squares by chunks, float64.
    records: by bytes per parameter, records in the same memory: only one of
      them may hold a step.
    num_escapes: by bytes per parameter, the escapes of the last step recorded.
    capacity_bytes: of all arrays.
  """

  def __init__(self, num_params: int, pool: Pool):
    """Allocates and fills the arrays; see `reset`."""
    self.num_params = num_params
    self._pool = pool
    self._noise = np.random.default_rng(0).standard_normal(
      _NOISE_ELEMS + _TILE_ELEMS, np.float32
    )
    sizes = _sizes(num_params)
    arena = Arena(
      Arena.bytes_for(s.num_elems * s.dtype.itemsize for s in sizes.values()),
      pool=pool,
    )
    taken = {
      name: arena.empty(s.num_elems, s.dtype) for name, s in sizes.items()
    }
    self.capacity_bytes = arena.capacity_bytes
    self.p, self.mu, self.nu = taken["p"], taken["mu"], taken["nu"]
    self.grad, self.grad16 = taken["grad"], taken["grad16"]
    self.weight = taken["weight"]
    self.p_high, self.p_low = taken["p_high"], taken["p_low"]
    self.sumsq = taken["sumsq"]
    self.records = {form: _record(taken, num_params, form) for form in (2, 3)}
    self.num_escapes = dict.fromkeys(self.records, 0)
    self.reset()

  def reset(self) -> None:
    """Puts all into the state that contenders start from.

    Parameters of about 0.02, moments as after many steps, gradients number 0,
    and weights of 0.
    """
    self.weight.fill(0)
    self.refresh_grads(1)
    self.mu[:] = self.grad
    self.mu *= np.float32(0.3)
    self.refresh_grads(2)
    np.square(self.grad, out=self.nu)
    self.nu += np.float32(0.5 * _GRAD_SCALE**2)
    self.refresh_grads(3)
    self.p[:] = self.grad
    self.p *= np.float32(2)
    for start in range(0, self.num_params, _TILE_ELEMS):
      part = slice(start, start + _TILE_ELEMS)
      self.p_high[part], self.p_low[part] = split_float32(self.p[part])
    self.refresh_grads(0)

  def refresh_grads(self, number: int) -> None:
    """Writes other normal gradients, of `_GRAD_SCALE`.

    Args:
      number: the same gives the same.
    """
    rng = np.random.default_rng(number)
    for start in range(0, self.num_params, _TILE_ELEMS):
      tile = self.grad[start : start + _TILE_ELEMS]
      offset = int(rng.integers(_NOISE_ELEMS))
      noise = self._noise[offset : offset + tile.size]
      np.multiply(noise, np.float32(_GRAD_SCALE), out=tile)
    narrow = Narrow([NarrowSegment(self.grad, self.grad16)])
    self._pool.submit(narrow).wait()

  def huge_page_share(self) -> float:
    """Returns which part of the arrays' memory is in huge pages."""
    return huge_page_share([(self.p.ctypes.data, self.capacity_bytes)])


def huge_page_share(ranges: Iterable[tuple[int, int]]) -> float:
  """Returns which part of the memory around some ranges is in huge pages.

  It is counted by whole mappings, as the operating system does.

  Args:
    ranges: address and bytes of each.

  Returns:
    A number in [0, 1]; NaN where it is not told (Linux only tells it).
  """
  path = Path("/proc/self/smaps")
  if not path.exists():
    return float("nan")
  ranges = list(ranges)
  resident = huge = 0
  for start, end, sizes in _mappings(path.read_text()):
    if any(start < a + size and a < end for a, size in ranges):
      resident += sizes["Rss"]
      huge += sizes["AnonHugePages"]
  return huge / resident if resident else float("nan")


def huge_page_policy() -> str | None:
  """Returns when memory that asks for nothing gets huge pages.

  "always", "madvise" (if it asks) or "never"; None if not told.
  """
  path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
  if not path.exists():
    return None
  return path.read_text().partition("[")[2].partition("]")[0]


def last_level_cache_bytes() -> int | None:
  """Returns the size of the largest cache of core 0; None if not told."""
  sizes = [
    int(path.read_text().strip().removesuffix("K")) << 10
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
  ]
  return max(sizes, default=None)


def _sizes(num_params: int) -> dict[str, Size]:
  f32, i16 = np.dtype(np.float32), np.dtype(np.int16)
  escapes = int(_ESCAPE_BYTES_PER_PARAM * num_params) // 4
  return {
    **{name: Size(f32, num_params) for name in ("p", "mu", "nu", "grad")},
    **{name: Size(_BF16, num_params) for name in ("grad16", "weight")},
    "p_high": Size(_BF16, num_params),
    "p_low": Size(i16, num_params),
    "codes": Size(np.dtype(np.uint8), codes_bytes([num_params], 3)),
    "escapes": Size(f32, escapes),
    "offsets": Size(np.dtype(np.int64), num_offsets([num_params])),
    "sumsq": Size(np.dtype(np.float64), -(-num_params // CHUNK_ELEMS)),
  }


def _record(
  taken: dict[str, np.ndarray], num_params: int, bytes_per_param: int
) -> Record:
  """Makes a record out of arrays that are long enough for each form."""
  codes = taken["codes"][: codes_bytes([num_params], bytes_per_param)]
  return Record(
    codes, taken["escapes"], taken["offsets"], bytes_per_param=bytes_per_param
  )


def _mappings(smaps: str):
  r"""Yields start, end and sizes in KiB of each mapping.

  >>> text = "10-2f rw-p 0 00:00 0\nRss:  8 kB\nAnonHugePages:  4 kB\n"
  >>> list(_mappings(text))
  [(16, 47, {'Rss': 8, 'AnonHugePages': 4})]
  """
  for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.M)[1:]:
    start, end = (int(x, 16) for x in block.split(maxsplit=1)[0].split("-"))
    sizes = re.findall(r"^(\w+): +(\d+) kB$", block, re.M)
    yield start, end, {name: int(size) for name, size in sizes}
