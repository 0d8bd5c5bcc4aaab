"""Gradients that leave a program while it runs, into host memory.

A program sends its gradients to a GradientSink, where the host waits for them.
In between is C++: an XLA FFI handler that copies a gradient and posts that it
is there. It runs on a thread of XLA's, takes no GIL and calls nothing of jax,
so that neither Python nor jax can hold up the device in it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sojax import _cpu_ops

_TARGET = "sojax_gradient_out"

for _platform, _handler in _cpu_ops.gradient_out_handlers().items():
  jax.ffi.register_ffi_target(_TARGET, _handler, platform=_platform)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Route:
  """The destinations of one program.

  Attributes:
    index: its number in its sink.
    operand: int32 [number of devices], one element on each: what the program
      takes to find the route.
  """

  index: int
  operand: jax.Array


class GradientSink:
  """Destinations of gradients on the host, and who waits for them.

  Programs find a route by the address of its operand on their device. An
  operand that has no route, a gradient of another size than its destination's,
  and one that comes before its predecessor was taken, are errors of the
  program; so is everything once the sink is closed.
  """

  @staticmethod
  def send(gradient: jax.Array, route: jax.Array, place: int) -> None:
    """Sends a gradient out of the program that is being traced.

    Under jax.shard_map, manual over all axes, each device sends its own.

    Args:
      gradient: any shape and dtype.
      route: the `operand` of a Route, as it came into the program: int32 [1] on
        each device.
      place: the place among the route's destinations.
    """
    call = jax.ffi.ffi_call(_TARGET, (), has_side_effect=True)
    call(gradient, route, place=np.int64(place))

  def __init__(self):
    self._sink = _cpu_ops.GradientSink()
    self._operands: list[jax.Array] = []

  def add_route(
    self,
    sharding: jax.sharding.Sharding,
    destinations: Mapping[Any, Sequence[np.ndarray]],
  ) -> Route:
    """Adds the destinations of a program.

    Args:
      sharding: that of the route's operand; it gives each device one element.
      destinations: for each of its addressable devices one flat array for each
        gradient of the program, by place. The sink keeps them until it is
        closed.

    Returns:
      The route.

    Raises:
      TypeError: if a destination is not a NumPy array.
      ValueError: if one is not flat, contiguous and writable, if the devices
        are not those of `sharding`, or have not equally many destinations.
    """
    devices = sharding.addressable_devices
    if set(destinations) != devices:
      raise ValueError(
        f"destinations are on {sorted(map(str, destinations))}; the route's"
        f" operand is on {sorted(map(str, devices))}: give each device its own"
      )
    zeros = jnp.zeros((len(sharding.device_set),), jnp.int32)
    operand = jax.block_until_ready(jax.device_put(zeros, sharding))
    index = self._sink.add_route(
      [
        (
          shard.data.unsafe_buffer_pointer(),
          list(destinations[shard.device]),
        )
        for shard in operand.addressable_shards
      ]
    )
    self._operands.append(operand)  # its addresses must not become another's
    return Route(index, operand)

  def wait(
    self, route: Route, places: Sequence[int], *, ticket: int = 0
  ) -> None:
    """Blocks, without the GIL, until gradients are there, and takes them.

    The destinations then hold them until the program delivers there again.

    Args:
      route: a route of this sink.
      places: which of its gradients; all devices must have delivered them.
      ticket: what `interrupt` knows this wait by.

    Raises:
      RuntimeError: if the ticket is interrupted; nothing is taken then.
      ValueError: if the sink is closed.
      IndexError: if the route has no such place.
    """
    if not self._sink.wait(route.index, list(places), ticket):
      raise RuntimeError(f"waiting for gradients of {ticket} was interrupted")

  def interrupt(self, first_ticket: int = 0) -> None:
    """Ends waits, now and until `reset`, with this ticket or a later one."""
    self._sink.interrupt(first_ticket)

  def reset(self) -> None:
    """Forgets interrupts, and gradients that nobody took.

    The programs that deliver must have ended.
    """
    self._sink.reset()

  def close(self) -> None:
    """Ends all waits; nothing is written from now on. May be called again."""
    self._sink.close()
