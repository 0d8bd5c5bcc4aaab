"""The operations of sojax as contenders."""

from experiments.adam.arrays import Arrays
from experiments.adam.pairing import Contender, State
from experiments.adam.settings import SCALARS, Setting
from sojax.host.kernels import Pool
from sojax.host.operations import AdamwStep, Finish, Operation, RecordStep, Redo
from sojax.host.segments import Segment
from sojax.reference.record import join_float32

# Taken first and then taken back by the redo, as if the norm of the gradients
# had been twice what is allowed.
_BEFORE_REDO_SCALE = 2.0


def step(arrays: Arrays, setting: Setting, pool: Pool) -> Contender:
  """Returns the plain step, with which all are compared."""
  segment = _segment(arrays, setting)
  return _contender(arrays, setting, pool, "step", _step(segment))


def variants(arrays: Arrays, setting: Setting, pool: Pool) -> list[Contender]:
  """Returns the other operations.

  They are "record3" and "record2" (a step that can be taken back), "redo" (of
  a step with the longer record), "fused_norm" (a step that also sums the
  squares of its gradients) and, where there are weights to write, "split" (a
  step of masters that are their own weights).
  """
  contenders = [_recording(arrays, setting, pool, form) for form in (3, 2)]
  contenders.append(_redo(arrays, setting, pool))
  segment = _segment(arrays, setting, arrays.sumsq)
  fused = _contender(arrays, setting, pool, "fused_norm", _step(segment))
  contenders.append(fused)
  if setting.half:
    contenders.append(_split(arrays, setting, pool))
  return contenders


def _segment(arrays: Arrays, setting: Setting, sumsq=None) -> Segment:
  return Segment(
    arrays.p,
    arrays.mu,
    arrays.nu,
    setting.grad(arrays),
    setting.weight(arrays),
    sumsq_out=sumsq,
  )


def _step(segment: Segment) -> AdamwStep:
  return AdamwStep([segment], SCALARS, 1.0)


def _contender(
  arrays: Arrays,
  setting: Setting,
  pool: Pool,
  name: str,
  operation: Operation,
  **untimed,
) -> Contender:
  def state() -> State:
    return arrays.p, arrays.mu, arrays.nu, setting.weight(arrays)

  return Contender(
    name=name,
    run=lambda: pool.submit(operation).wait(),
    state=state,
    **untimed,
  )


def _recording(
  arrays: Arrays, setting: Setting, pool: Pool, form: int
) -> Contender:
  segments, record = [_segment(arrays, setting)], arrays.records[form]

  def finish() -> None:
    _check_complete(arrays, form)
    pool.submit(Finish(segments, record)).wait()

  operation = RecordStep(segments, SCALARS, 1.0, record)
  return _contender(
    arrays, setting, pool, f"record{form}", operation, after=finish
  )


def _redo(arrays: Arrays, setting: Setting, pool: Pool) -> Contender:
  segments, record = [_segment(arrays, setting)], arrays.records[3]

  def record_first() -> None:
    pool.submit(
      RecordStep(segments, SCALARS, _BEFORE_REDO_SCALE, record)
    ).wait()
    _check_complete(arrays, 3)

  operation = Redo(segments, record, 1.0)
  return _contender(
    arrays, setting, pool, "redo", operation, before=record_first
  )


def _split(arrays: Arrays, setting: Setting, pool: Pool) -> Contender:
  segment = Segment(
    arrays.p_high,
    arrays.mu,
    arrays.nu,
    setting.grad(arrays),
    p_low_inout=arrays.p_low,
  )

  def state() -> State:
    p = join_float32(arrays.p_high, arrays.p_low)
    return p, arrays.mu, arrays.nu, arrays.p_high

  return Contender(
    name="split",
    run=lambda: pool.submit(_step(segment)).wait(),
    state=state,
  )


def _check_complete(arrays: Arrays, form: int) -> None:
  """Raises if the record left chunks out, whose time would be missing."""
  record = arrays.records[form]
  arrays.num_escapes[form] = record.num_escapes()
  if record.num_left_out():
    raise RuntimeError(
      f"a record of {form} bytes per parameter was full after"
      f" {record.num_escapes()} escapes of {3 * arrays.num_params} values; its"
      " time would be wrong"
    )
