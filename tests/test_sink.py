"""Gradients that leave running programs, against the arrays they came from."""

import gc
import subprocess
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)

from sojax.host.sink import GradientSink

_AXES = ("data", "seq")
_DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.fixture
def sink():
  sink = GradientSink()
  yield sink
  sink.close()


def one_device():
  return SingleDeviceSharding(jax.devices()[0])


def add_route(sink, *destinations):
  """Adds a route on the first device."""
  return sink.add_route(one_device(), {jax.devices()[0]: destinations})


def random_bits(shape, dtype, seed=0):
  """Any bits, NaNs included: what is copied must not be touched."""
  rng = np.random.default_rng(seed)
  size = int(np.prod(shape)) * np.dtype(dtype).itemsize
  return np.frombuffer(rng.bytes(size), dtype).reshape(shape)


@jax.jit
def send_all(gradients, route):
  """Sends each to the place of its number; something else ends the program."""
  for place, gradient in enumerate(gradients):
    GradientSink.send(gradient, route, place)
  return sum(jnp.sum(jnp.ones_like(x)) for x in gradients)


def run(gradients, route):
  jax.block_until_ready(send_all(gradients, route.operand))


@pytest.mark.parametrize("dtype", _DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5, 7), (300, 1000)])
def test_every_bit_arrives(sink, shape, dtype):
  gradients = [random_bits(shape, dtype, seed) for seed in range(2)]
  arrived = [np.zeros(gradient.size, dtype) for gradient in gradients]
  route = add_route(sink, *arrived)
  for _ in range(2):
    run([jnp.array(x, copy=True) for x in gradients], route)
    sink.wait(route, [0, 1])
    for ours, theirs in zip(arrived, gradients, strict=True):
      assert ours.tobytes() == theirs.tobytes()
      ours[:] = 0


def on_all_devices(function):
  mesh = Mesh(np.array(jax.devices()).reshape(4, 2), _AXES)
  sharded = PartitionSpec(_AXES)
  mapped = jax.shard_map(
    function,
    mesh=mesh,
    in_specs=(sharded, sharded),
    out_specs=PartitionSpec(),
    check_vma=False,
  )
  return jax.jit(mapped), NamedSharding(mesh, sharded)


def test_each_device_has_its_own_destinations_under_shard_map(sink):
  def send_shard(x, route):
    GradientSink.send(2 * x, route, 1)
    total = jax.lax.psum(jnp.sum(x), _AXES)
    GradientSink.send(x + total, route, 0)
    return total

  program, sharding = on_all_devices(send_shard)
  size = 120_001
  arrived = {
    device: [np.zeros(size, np.float32) for _ in range(2)]
    for device in jax.devices()
  }
  route = sink.add_route(sharding, arrived)
  x = np.random.default_rng(0).integers(-99, 99, 8 * size).astype(np.float32)
  for _ in range(3):
    total = program(jax.device_put(x, sharding), route.operand)
    sink.wait(route, [1])
    sink.wait(route, [0])
    assert float(total) == x.sum(dtype=np.float64)
    placed = sharding.devices_indices_map(x.shape)
    for device, (rows,) in placed.items():
      np.testing.assert_array_equal(arrived[device][1], 2 * x[rows])
      np.testing.assert_array_equal(arrived[device][0], x[rows] + float(total))


def test_a_wait_takes_its_places_and_no_others(sink):
  first, second = np.zeros(2, np.float32), np.zeros(3, np.float32)
  route = add_route(sink, first, second)
  run([jnp.ones(2), jnp.ones(3)], route)
  sink.wait(route, [1])
  with pytest.raises(jax.errors.JaxRuntimeError, match="place 0 .* again"):
    run([jnp.ones(2), jnp.ones(3)], route)
  sink.wait(route, [0])


@pytest.mark.parametrize(
  ("gradients", "message"),
  [
    ([jnp.ones(3)], "place 0 of route 0 takes 8 bytes, but .* has 12"),
    ([jnp.ones(2, jnp.bfloat16)], "place 0 of route 0 takes 8 .* has 4"),
    ([jnp.ones(2)] * 2, "place 1 of route 0 is not there; it has 1"),
  ],
)
def test_what_does_not_fit_fails_the_program(sink, gradients, message):
  arrived = np.zeros(2, np.float32)
  route = add_route(sink, arrived)
  with pytest.raises(jax.errors.JaxRuntimeError, match=message):
    run(gradients, route)
  sink.reset()
  run([jnp.ones(2)], route)
  sink.wait(route, [0])
  np.testing.assert_array_equal(arrived, 1)


def test_an_operand_without_a_route_fails_the_program(sink):
  arrived = np.zeros(2, np.float32)
  route = add_route(sink, arrived)
  operand = jax.device_put(jnp.zeros((1,), jnp.int32), one_device())
  with pytest.raises(jax.errors.JaxRuntimeError, match="no route"):
    jax.block_until_ready(send_all([jnp.ones(2)], operand))
  assert not arrived.any()
  run([jnp.ones(2)], route)


def test_sinks_share_compiled_programs(sink):
  """The route is found by the operand, not by what is compiled."""
  other = GradientSink()
  arrived = [np.zeros(4, np.float32) for _ in range(2)]
  routes = [add_route(sink, arrived[0]), add_route(other, arrived[1])]
  send_all.clear_cache()
  for value, route in enumerate(routes, 1):
    run([jnp.full(4, value, jnp.float32)], route)
  assert send_all._cache_size() == 1
  np.testing.assert_array_equal(arrived[0], 1)
  np.testing.assert_array_equal(arrived[1], 2)
  other.close()


def in_thread(function):
  """Starts a thread; its join returns what the function raised, or None."""
  raised = []

  def target():
    try:
      function()
    except Exception as error:
      raised.append(error)

  thread = threading.Thread(target=target, daemon=True)
  thread.start()

  def join():
    thread.join(60)
    assert not thread.is_alive()
    return raised[0] if raised else None

  return join


def test_an_interrupt_ends_waits_with_its_ticket_or_a_later_one(sink):
  arrived = np.zeros(1, np.float32)
  route = add_route(sink, arrived)
  later = in_thread(lambda: sink.wait(route, [0], ticket=8))
  earlier = in_thread(lambda: sink.wait(route, [0], ticket=6))
  sink.interrupt(7)
  assert "gradients of 8 was interrupted" in str(later())
  equal = in_thread(lambda: sink.wait(route, [0], ticket=7))
  assert "gradients of 7 was interrupted" in str(equal())
  run([jnp.ones(1)], route)
  assert earlier() is None
  sink.reset()
  run([jnp.ones(1)], route)
  sink.wait(route, [0], ticket=8)


def test_reset_forgets_what_nobody_took(sink):
  arrived = np.zeros(1, np.float32)
  route = add_route(sink, arrived)
  run([jnp.ones(1)], route)
  sink.reset()
  run([jnp.full(1, 2.0)], route)
  sink.wait(route, [0])
  assert arrived[0] == 2


def test_closing_ends_waits():
  sink = GradientSink()
  route = add_route(sink, np.zeros(1, np.float32))
  waiting = in_thread(lambda: sink.wait(route, [0]))
  sink.close()
  assert isinstance(waiting(), ValueError)
  with pytest.raises(ValueError, match="the sink is closed"):
    sink.wait(route, [0])
  sink.close()


def held_back(gate):
  """A program that sends once the gate is open."""

  def wait_for_gate(x):
    assert gate.wait(60)
    return x

  @jax.jit
  def program(x, route):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    x = jax.pure_callback(wait_for_gate, shape, x)
    GradientSink.send(x, route, 0)
    return jnp.sum(x)

  return program


@pytest.mark.parametrize("how", ["close", "collect"])
def test_a_sink_that_goes_while_a_program_runs_fails_the_program(how):
  gate = threading.Event()
  program = held_back(gate)
  sink = GradientSink()
  arrived = np.zeros(200_000, np.float32)
  operand = add_route(sink, arrived).operand
  out = []
  running = in_thread(
    lambda: out.append(
      jax.block_until_ready(program(jnp.ones(200_000), operand))
    )
  )
  if how == "close":
    sink.close()
  del sink
  gc.collect()
  gate.set()
  error = running()
  assert isinstance(error, jax.errors.JaxRuntimeError), error
  assert "no route" in str(error)
  assert not arrived.any()


def test_destinations_live_until_the_sink_is_closed(sink):
  arrived = np.zeros(300_000, np.float32)
  there = weakref.ref(arrived)
  route = add_route(sink, arrived)
  del arrived
  gc.collect()
  assert there() is not None
  run([jnp.ones(300_000)], route)
  sink.wait(route, [0])
  np.testing.assert_array_equal(there(), 1)
  sink.close()
  gc.collect()
  assert there() is None


def read_only():
  array = np.zeros(4, np.float32)
  array.flags.writeable = False
  return array


@pytest.mark.parametrize(
  ("destination", "error"),
  [
    ([0.0], TypeError),
    (np.zeros((2, 2), np.float32), ValueError),
    (np.zeros(4, np.float32)[::2], ValueError),
    (read_only(), ValueError),
  ],
  ids=["list", "two dimensions", "strided", "read-only"],
)
def test_an_unusable_destination_is_refused(sink, destination, error):
  with pytest.raises(error, match="destination 1"):
    add_route(sink, np.zeros(1, np.float32), destination)


def test_devices_must_be_those_of_the_operand_and_have_as_many(sink):
  arrays = [np.zeros(1, np.float32) for _ in range(9)]
  _, sharding = on_all_devices(lambda x, route: jnp.sum(x))
  with pytest.raises(ValueError, match="give each device its own"):
    add_route_on = {jax.devices()[1]: arrays[:1]}
    sink.add_route(one_device(), add_route_on)
  unequal = {d: arrays[i : i + 1] for i, d in enumerate(jax.devices())}
  unequal[jax.devices()[7]] = arrays[7:]
  with pytest.raises(ValueError, match="1 and 2 destinations"):
    sink.add_route(sharding, unequal)


def test_a_route_or_place_that_is_not_there_is_an_error(sink):
  route = add_route(sink, np.zeros(1, np.float32))
  with pytest.raises(IndexError):
    sink.wait(route, [1])


_ON_ONE_CORE = """
import threading
from tests import conftest
import jax, jax.numpy as jnp, numpy as np
from tests.test_sink import on_all_devices, held_back, add_route
from sojax.host.sink import GradientSink

sink = GradientSink()
gate = threading.Event()
program = held_back(gate)
arrived = np.zeros(200_000, np.float32)
route = add_route(sink, arrived)
for value in range(5):
  gate.clear()
  opener = threading.Timer(0.05, gate.set)
  opener.start()
  total = program(jnp.full(200_000, value, jnp.float32), route.operand)
  sink.wait(route, [0])  # with the GIL, the gate would stay shut
  assert (arrived == value).all()
  opener.join()

program, sharding = on_all_devices(
  lambda x, route: (
    GradientSink.send(x, route, 0) or jax.lax.psum(jnp.sum(x), "data")
  )
)
shards = {d: [np.zeros(120_000, np.float32)] for d in jax.devices()}
route = sink.add_route(sharding, shards)
x = jax.device_put(jnp.arange(960_000, dtype=jnp.float32), sharding)
for _ in range(5):
  out = program(x, route.operand)
  sink.wait(route, [0])
  for shard in x.addressable_shards:
    np.testing.assert_array_equal(shards[shard.device][0], shard.data)
    shards[shard.device][0][:] = 0
print("arrived")
"""


def test_nothing_hangs_on_one_core():
  result = subprocess.run(
    ["taskset", "-c", "0", sys.executable, "-c", _ON_ONE_CORE],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert result.stdout == "arrived\n", result.stderr
