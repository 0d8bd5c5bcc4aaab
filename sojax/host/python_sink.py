"""The slow twin of a GradientSink: the same contract, in Python alone.

Gradients leave through jax's io_callback, which copies them twice, takes the
GIL, and calls jax on the thread that the program runs on: with few threads it
can wait for itself. It serves for comparison, on one device.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from sojax.host.sink import Route

_NUMBERS = itertools.count()
# By the number that is the content of a route's operand.
_SINKS: "weakref.WeakValueDictionary[int, PythonSink]" = (
  weakref.WeakValueDictionary()
)


def check_num_devices(num_devices: int) -> None:
  """Raises ValueError for more devices than a PythonSink can serve."""
  if num_devices > 1:
    raise ValueError(
      f"io_callback on {num_devices} devices can hang; use one device, or"
      " gradients_out='callback'"
    )


class PythonSink:
  """Destinations of gradients on the host, and who waits for them.

  See GradientSink, method by method. Here the operand's content names the
  route.
  """

  @staticmethod
  def send(gradient: jax.Array, route: jax.Array, place: int) -> None:
    """Sends a gradient out of the program that is being traced."""
    io_callback(functools.partial(_deliver, place), None, gradient, route)

  def __init__(self):
    self._changed = threading.Condition()
    self._destinations: dict[int, Sequence[np.ndarray]] = {}
    self._full: dict[int, set[int]] = {}
    self._interrupted_from: int | None = None
    self._closed = False

  def add_route(
    self,
    sharding: jax.sharding.Sharding,
    destinations: Mapping[Any, Sequence[np.ndarray]],
  ) -> Route:
    """Adds the destinations of a program.

    Raises:
      ValueError: for more than one device.
    """
    check_num_devices(len(sharding.device_set))
    number = next(_NUMBERS)
    operand = jnp.full((1,), number, jnp.int32)
    (arrays,) = destinations.values()
    with self._changed:
      self._destinations[number] = list(arrays)
      self._full[number] = set()
      _SINKS[number] = self
    return Route(number, jax.device_put(operand, sharding))

  def wait(
    self, route: Route, places: Sequence[int], *, ticket: int = 0
  ) -> None:
    """Blocks until gradients are there, and takes them."""
    full = self._full[route.index]

    def interrupted() -> bool:
      first = self._interrupted_from
      return first is not None and ticket >= first

    with self._changed:
      self._changed.wait_for(
        lambda: self._closed or interrupted() or full.issuperset(places)
      )
      if self._closed:
        raise ValueError("the sink is closed; make a new one")
      if interrupted():
        raise RuntimeError(f"waiting for gradients of {ticket} was interrupted")
      full.difference_update(places)

  def interrupt(self, first_ticket: int = 0) -> None:
    """Ends waits, now and until `reset`, with this ticket or a later one."""
    with self._changed:
      known = self._interrupted_from
      self._interrupted_from = (
        first_ticket if known is None else min(known, first_ticket)
      )
      self._changed.notify_all()

  def reset(self) -> None:
    """Forgets interrupts, and gradients that nobody took."""
    with self._changed:
      self._interrupted_from = None
      for full in self._full.values():
        full.clear()

  def close(self) -> None:
    """Ends all waits; nothing is written from now on. May be called again."""
    with self._changed:
      self._closed = True
      for number in self._destinations:
        _SINKS.pop(number, None)
      self._changed.notify_all()

  def _deliver(self, number: int, place: int, gradient: np.ndarray) -> None:
    """Copies a gradient; under the lock, so that `close` waits for the copy."""
    name = f"place {place} of route {number}"
    with self._changed:
      if self._closed:
        raise ValueError("a gradient's sink is closed")
      destinations = self._destinations[number]
      if place >= len(destinations):
        raise ValueError(f"{name} is not there; it has {len(destinations)}")
      destination = destinations[place]
      if destination.nbytes != gradient.nbytes:
        raise ValueError(
          f"{name} takes {destination.nbytes} bytes, but its gradient has"
          f" {gradient.nbytes}"
        )
      if place in self._full[number]:
        raise ValueError(f"{name} was delivered again before the host took it")
      # As bytes: neither shape nor dtype matters.
      destination.view(np.uint8)[:] = gradient.reshape(-1).view(np.uint8)
      self._full[number].add(place)
      self._changed.notify_all()


def _deliver(place: int, gradient: Any, route: Any) -> None:
  """Runs on the program's thread, with jax arrays."""
  number = int(np.asarray(route)[0])
  sink = _SINKS.get(number)
  if sink is None:
    raise ValueError(
      "a gradient has no route: its operand is not one of an open sink"
    )
  sink._deliver(number, place, np.asarray(gradient))
