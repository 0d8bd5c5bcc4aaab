"""Records for tests, and what rollback promises of one state."""

import numpy as np
import pytest

from sojax.host.operations import (
  RecordStep,
  Redo,
  Undo,
)
from sojax.host.record import new_record
from sojax.plan.adamw import adam_scalars, adamw
from sojax.reference.record import record_float32
from tests.kernel_cases import (
  GRAD_SCALE,
  SCALARS,
  assert_same_state,
)

CHUNK = 1 << 14
NEW_SCALE = 0.11
every_form = pytest.mark.parametrize("form", [2, 3])
NO_DECAY = adam_scalars(
  adamw(1e-3, b1=0.9, b2=0.999, weight_decay=0.0), count=1000
)


def state_bytes(state):
  """The bytes of what a step changes, weights aside."""
  arrays = (state.p, state.mu, state.nu, state.p_low)
  return [None if x is None else x.tobytes() for x in arrays]


def record_for(states, form, cap=12):
  """A record with room for everything, full of what must not matter."""
  lengths = [state.p.size for state in states]
  record = new_record(lengths, bytes_per_param=form, escape_bytes_per_param=cap)
  record.codes[:] = 0xEE
  record.escapes[:] = np.nan
  record.offsets[:] = 12345
  return record


def take(pool, states, record, scalars=SCALARS, grad_scale=GRAD_SCALE):
  """Takes and records the step of these states. Returns their segments."""
  segments = [state.segment() for state in states]
  pool.submit(RecordStep(segments, scalars, grad_scale, record)).wait()
  return segments


def assert_record_is_the_twins(record, states, scalars, grad_scale):
  """Codes and escapes of all chunks of the states before the step."""
  codes, chunk = [], 0
  for state in states:
    p, mu, nu = state.masters()
    for start in range(0, p.size, CHUNK):
      at = slice(start, start + CHUNK)
      twin = record_float32(
        (p[at], mu[at], nu[at]),
        state.whole_grad()[at],
        scalars,
        grad_scale,
        record.bytes_per_param,
      )
      codes.append(twin.codes)
      first = record.offsets[chunk]
      escapes = record.escapes[first : first + twin.escapes.size]
      assert escapes.tobytes() == twin.escapes.tobytes()
      chunk += 1
  if codes:
    np.testing.assert_array_equal(record.codes, np.concatenate(codes))


def check(pool, original, form, scalars=SCALARS, grad_scale=GRAD_SCALE):
  """All that rollback promises, of one state. Returns the escapes.

  With room for all escapes.
  """
  state = original.copy()
  record = record_for([state], form)
  segments = take(pool, [state], record, scalars, grad_scale)
  assert_same_state(state, original.twin(scalars, grad_scale))
  assert record.num_left_out() == 0
  assert_record_is_the_twins(record, [original], scalars, grad_scale)
  pool.submit(Undo(segments, record)).wait()
  assert state_bytes(state) == state_bytes(original)

  take(pool, [state], record, scalars, grad_scale)
  num_escapes = record.num_escapes()
  pool.submit(Redo(segments, record, NEW_SCALE)).wait()
  assert_same_state(state, original.twin(scalars, NEW_SCALE))
  return num_escapes
