"""Types of the extension module that setup.py builds from cpu_ops/."""

from collections.abc import Iterable, Sequence

import numpy as np

_AdamSegment = tuple[
  np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None
]
_AccumulateSegment = tuple[np.ndarray, np.ndarray, np.ndarray | None]

CHUNK_ELEMS: int

def available_isas() -> list[tuple[str, int]]: ...

class AdamParams:
  def __init__(
    self,
    *,
    b1: float,
    b2: float,
    one_minus_b1: float,
    one_minus_b2: float,
    k: float,
    r: float,
    s: float,
    d: float,
    eps: float,
    grad_scale: float,
  ) -> None: ...

class Pool:
  def __init__(
    self, num_threads: int, isa: str, cores: Sequence[int]
  ) -> None: ...
  def adamw_step(
    self, segments: Iterable[_AdamSegment], params: AdamParams
  ) -> None: ...
  def widen(self, segments: Iterable[_AccumulateSegment]) -> None: ...
  def accumulate(self, segments: Iterable[_AccumulateSegment]) -> None: ...
  def close(self) -> None: ...
