"""Types of the extension module that setup.py builds from cpu_ops/."""

from collections.abc import Iterable, Sequence

import numpy as np

# Fields in the order in which the classes of sojax.host.segments give them.
_Fields = tuple[np.ndarray | None, ...]
# Bytes per parameter, codes, escapes, offsets.
_Record = tuple[int, np.ndarray, np.ndarray, np.ndarray]

CHUNK_ELEMS: int
RECORD_CHUNK_ELEMS: int
RECORD_GROUP_ELEMS: int

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

class Submitted:
  def wait(self) -> None: ...
  def done(self) -> bool: ...

class Pool:
  def __init__(
    self, num_threads: int, isa: str, cores: Sequence[int]
  ) -> None: ...
  def adamw_step(
    self, segments: Iterable[_Fields], params: AdamParams
  ) -> Submitted: ...
  def record(
    self, segments: Iterable[_Fields], params: AdamParams, record: _Record
  ) -> Submitted: ...
  def finish(
    self, segments: Iterable[_Fields], params: AdamParams, record: _Record
  ) -> Submitted: ...
  def undo(
    self, segments: Iterable[_Fields], params: AdamParams, record: _Record
  ) -> Submitted: ...
  def redo(
    self,
    segments: Iterable[_Fields],
    params: AdamParams,
    new_grad_scale: float,
    record: _Record,
  ) -> Submitted: ...
  def widen(self, segments: Iterable[_Fields]) -> Submitted: ...
  def accumulate(self, segments: Iterable[_Fields]) -> Submitted: ...
  def squares(self, segments: Iterable[_Fields]) -> Submitted: ...
  def narrow(self, segments: Iterable[_Fields]) -> Submitted: ...
  def zero(self, segments: Iterable[_Fields]) -> Submitted: ...
  def bind_to_cores(self, cores: Sequence[int]) -> None: ...
  def close(self) -> None: ...

class GradientSink:
  def add_route(
    self, shards: Sequence[tuple[int, Sequence[np.ndarray]]]
  ) -> int: ...
  def wait(self, route: int, places: Sequence[int], ticket: int) -> bool: ...
  def interrupt(self, first_ticket: int) -> None: ...
  def reset(self) -> None: ...
  def close(self) -> None: ...

def gradient_out_handlers() -> dict[str, object]: ...
