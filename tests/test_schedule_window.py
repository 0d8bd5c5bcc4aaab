"""How many backwards' gradients are on the device at once."""

import pytest

from sojax.graph.graph import TaskKind
from tests.test_schedule import account_of, graph_of, of_kind

NUM_BLOCKS = 4
STAGE_BYTES = 4 << 14  # of each stage's gradients


def waits_of_backwards(**switches):
  """Returns, by backward in order, which backwards' gradients it waits for."""
  graph = graph_of(NUM_BLOCKS, **switches)
  backwards = of_kind(graph, TaskKind.BACKWARD)
  order = {(t.stage, t.micro): place for place, t in enumerate(backwards)}
  return [
    [
      order[dep.stage, dep.micro]
      for dep in (graph.tasks[i] for i in task.deps)
      if dep.kind is TaskKind.GRAD_OUT
    ]
    for task in backwards
  ]


@pytest.mark.parametrize("weights", ["stationary", "flow"])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_backward_waits_until_there_is_room_for_its_gradients(
  weights, window
):
  waits = waits_of_backwards(weights=weights, grad_window=window)
  assert waits == [
    [place - window] if place >= window else []
    for place in range(NUM_BLOCKS + 2)
  ]


def test_the_window_goes_on_from_one_micro_batch_to_the_next():
  waits = waits_of_backwards(
    grad_window=2, accumulate="host", accumulation=3, gradients_out="dma"
  )
  assert waits == [
    [place - 2] if place >= 2 else [] for place in range(3 * (NUM_BLOCKS + 2))
  ]


def test_sums_on_the_device_wait_in_the_last_micro_batch_only():
  waits = waits_of_backwards(grad_window=1, accumulation=2)
  num_stages = NUM_BLOCKS + 2
  assert waits[:num_stages] == [[]] * num_stages
  assert waits[num_stages:] == [
    [],
    *([place] for place in range(num_stages, 2 * num_stages - 1)),
  ]


def test_nothing_waits_without_a_window_or_if_backward_delivers():
  assert not any(waits_of_backwards())
  assert not any(waits_of_backwards(grad_window=1, gradients_out="callback"))


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("accumulate", ["device", "host"])
def test_the_account_has_the_gradients_of_the_window(window, accumulate):
  account, _ = account_of(
    NUM_BLOCKS, accumulation=2, grad_window=window, accumulate=accumulate
  )
  assert account.device["gradients"] == window * STAGE_BYTES


def test_a_wide_window_takes_no_more_than_all_gradients():
  wide = account_of(NUM_BLOCKS, grad_window=100)[0].device["gradients"]
  assert wide == (NUM_BLOCKS + 2) * STAGE_BYTES
  assert account_of(NUM_BLOCKS)[0].device["gradients"] == wide
