"""Failures while backward delivers gradients: nothing hangs or is lost."""

import contextlib
import threading

import numpy as np
import pytest

import sojax
from sojax.host.sink import GradientSink
from sojax.host.wire import WireBuffer
from sojax.runtime import callback_out
from sojax.runtime.run import StepRun
from tests.layered import Staged, Whole
from tests.training import (
  assert_same_bits,
  batches,
  state_of,
  trainer,
)


class Fault(RuntimeError):
  """What the tests raise."""


def failing_once():
  """Returns a function that raises on demand, and the demand."""
  wanted = threading.Event()

  def on_backward():
    if wanted.is_set():
      wanted.clear()
      raise Fault("in the model")

  return on_backward, wanted


def fail_twice_in_step_2(ours, data, fail, message):
  """Takes step 2 twice; the state must stay what it was before."""
  for _ in range(2):
    with pytest.raises(sojax.StepError, match="step 2 failed") as caught:
      fail()
      ours.drain()
    assert caught.value.intact
    assert "backward" in caught.value.task
    assert message in str(caught.value.__cause__)
  for batch in data[2:]:
    ours.step(batch)


@pytest.mark.parametrize("transport", ["callback", "io_callback"])
@pytest.mark.parametrize("model", [Whole, Staged])
def test_an_exception_in_the_model_loses_nothing(model, transport):
  """JAX raises it where the program is dispatched."""
  on_backward, wanted = failing_once()
  data = batches(4)
  plan = {"gradients_out": transport, "bucket_bytes": 1 << 16}
  with (
    trainer(plan, model=model(on_backward=on_backward)) as ours,
    trainer(plan, model=model(on_backward=lambda: None)) as theirs,
  ):
    for batch in data[:2]:
      ours.step(batch)
    ours.drain()

    def fail():
      wanted.set()
      ours.step(data[2])

    fail_twice_in_step_2(ours, data, fail, "Fault: in the model")
    for batch in data:
      theirs.step(batch)
    assert_same_bits(state_of(ours), state_of(theirs))


def without_token_255(count):
  data = batches(count)
  for batch in data:
    batch["tokens"] %= 255
  return data


@pytest.mark.parametrize("weights", ["stationary", "flow"])
@pytest.mark.parametrize("model", [Whole, Staged])
def test_a_program_that_fails_before_it_delivers_loses_nothing(model, weights):
  """The step waits for gradients already when its program fails."""
  data = without_token_255(4)
  bad = {"tokens": data[2]["tokens"].copy()}
  bad["tokens"][1, 3] = 255
  plan = {"gradients_out": "callback", "weights": weights}
  plan["bucket_bytes"] = 1 << 16
  with (
    trainer(plan, model=model(bad_token=255)) as ours,
    trainer(plan, model=model(bad_token=255)) as theirs,
  ):
    for batch in data[:2]:
      ours.step(batch)
    fail_twice_in_step_2(ours, data, lambda: ours.step(bad), "no route")
    for batch in data:
      theirs.step(batch)
    assert_same_bits(state_of(ours), state_of(theirs))


def test_an_interrupted_later_step_lets_this_one_end(monkeypatch):
  """Ctrl-C in step 1 before step 0 has begun to wait for gradients."""
  interrupted = threading.Event()
  data = batches(3)
  main_thread = threading.current_thread()
  wait_until_ready = StepRun.wait_until_ready

  def interrupt_step_1(run, task):
    if run.step.number and threading.current_thread() is main_thread:
      raise KeyboardInterrupt
    wait_until_ready(run, task)

  with trainer(model=Whole()) as ours, trainer(model=Whole()) as theirs:
    sink = ours._parts.gradients_out._sink
    interrupt = ours._executor._interrupt

    def interrupt_and_tell(first_step):
      interrupt(first_step)
      interrupted.set()

    def wait(*args, **kwargs):
      assert interrupted.wait(60)
      GradientSink.wait(sink, *args, **kwargs)

    ours._executor._interrupt = interrupt_and_tell
    sink.wait = wait
    ours.step(data[0])
    monkeypatch.setattr(StepRun, "wait_until_ready", interrupt_step_1)
    with pytest.raises(KeyboardInterrupt):
      ours.step(data[1])
    monkeypatch.undo()
    with pytest.raises(sojax.StepError, match="step 1 failed") as caught:
      ours.drain()
    assert caught.value.intact
    for batch in data[1:]:
      ours.step(batch)
    for batch in data:
      theirs.step(batch)
    assert_same_bits(state_of(ours), state_of(theirs))


@pytest.mark.parametrize("transport", ["callback", "io_callback"])
def test_a_destination_of_another_size_fails_the_step(monkeypatch, transport):
  class Short(WireBuffer):
    def __init__(self, shape, dtype, placement):
      super().__init__((int(np.prod(shape)) - 1,), dtype, placement)

  monkeypatch.setattr(callback_out, "WireBuffer", Short)
  with trainer({"gradients_out": transport}, model=Staged()) as ours:
    for _ in range(2):
      with pytest.raises(sojax.StepError, match="step 0 failed") as caught:
        ours.step(batches(1)[0])
        ours.drain()
      assert caught.value.intact
      assert "bytes, but its gradient has" in str(caught.value.__cause__)


def test_a_closed_trainer_ends_while_nothing_can_arrive():
  """Close must not wait for gradients of a step that failed."""
  on_backward, wanted = failing_once()
  ours = trainer(model=Whole(on_backward=on_backward))
  wanted.set()
  with contextlib.suppress(sojax.StepError):
    ours.step(batches(1)[0])
  ours.close()
  with pytest.raises(ValueError, match="the sink is closed"):
    ours._parts.gradients_out._sink.wait(
      ours._parts.gradients_out._routes[0, 0], [0]
    )
