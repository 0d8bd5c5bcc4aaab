"""Binding to NUMA nodes: the oracle is /proc/self/numa_maps."""

import errno
import pathlib
import re

import numpy as np
import pytest

from sojax.host import numa
from sojax.host.arena import Arena
from tests.training import trainer

HUGE_PAGE = 2 << 20
NUMA_MAPS = pathlib.Path("/proc/self/numa_maps")
# What containers answer to system calls that they do not allow.
FORBIDDEN = (errno.EPERM, errno.ENOSYS)

every_node = pytest.mark.parametrize("node", numa.memory_nodes())


def or_skip(make):
  """Calls a function that binds memory; skips where that is forbidden."""
  try:
    return make()
  except OSError as error:
    if error.errno in FORBIDDEN:
      pytest.skip(f"no mbind here: {error}")
    raise


def policy_and_nodes(address):
  """The policy of a mapping, and the nodes that its pages are on."""
  lines = NUMA_MAPS.read_text().splitlines()
  fields = [line.split() for line in lines]
  starts = [(int(words[0], 16), words) for words in fields]
  words = max(x for x in starts if x[0] <= address)[1]
  nodes = {int(w[1 : w.index("=")]) for w in words[2:] if w[0] == "N"}
  return words[1], nodes


@every_node
def test_pages_of_a_bound_arena_are_on_its_node(node):
  arena = or_skip(lambda: Arena(5 * HUGE_PAGE + 1, numa_node=node))
  array = arena.empty(5 * HUGE_PAGE + 1, np.uint8)
  array.fill(1)
  for byte in (0, array.size - 1):
    address = array[byte:].ctypes.data
    assert policy_and_nodes(address) == (f"bind:{node}", {node})


@pytest.mark.skipif(
  not NUMA_MAPS.exists(), reason="this kernel knows no NUMA nodes"
)
def test_an_arena_is_not_bound_unless_asked():
  array = Arena(HUGE_PAGE).empty(HUGE_PAGE, np.uint8)
  assert policy_and_nodes(array.ctypes.data)[0] == "default"


@every_node
def test_host_buckets_and_sums_are_on_the_node_of_the_plan(node, arenas):
  plan = {"numa_node": node, "accumulate": "host"}
  with or_skip(lambda: trainer(plan, accumulation=2)):
    assert len(arenas) == 2
    for arena in arenas:
      found = policy_and_nodes(arena._block.ctypes.data)
      assert found == (f"bind:{node}", {node})


@pytest.mark.parametrize("node", [-1, max(numa.memory_nodes(), default=0) + 1])
def test_a_node_that_does_not_exist_is_an_error_that_names_those_that_do(node):
  exist = re.escape(str([*numa.memory_nodes()]))
  with pytest.raises(
    ValueError, match=f"numa_node={node} is not .* this machine has {exist}"
  ):
    Arena(HUGE_PAGE, numa_node=node)
  with pytest.raises(ValueError, match=f"numa_node={node}"):
    Arena(0, numa_node=node)


def test_nodes_are_read_as_the_system_lists_them(tmp_path, monkeypatch):
  listed = tmp_path / "has_memory"
  monkeypatch.setattr(numa, "_HAS_MEMORY", listed)
  assert numa.memory_nodes() == ()
  listed.write_text("0,2-4,7\n")
  assert numa.memory_nodes() == (0, 2, 3, 4, 7)


@pytest.mark.parametrize("node", [9, 63, 64, 700])
def test_what_the_kernel_refuses_is_an_error_with_its_errno(
  node, tmp_path, monkeypatch
):
  """No machine of these tests has that node, whatever the file says."""
  if node in numa.memory_nodes():
    pytest.skip(f"this machine has node {node}")
  listed = tmp_path / "has_memory"
  listed.write_text("0-700")
  monkeypatch.setattr(numa, "_HAS_MEMORY", listed)
  match = f"mbind refused {HUGE_PAGE} bytes on numa_node={node}: "
  with pytest.raises(OSError, match=match) as caught:
    Arena(HUGE_PAGE, numa_node=node)
  assert caught.value.errno in (errno.EINVAL, *FORBIDDEN)


@pytest.mark.parametrize(
  ("node", "mask", "num_bits"),
  [(0, [1], 65), (63, [1 << 63], 65), (64, [0, 1], 129), (70, [0, 64], 129)],
)
def test_the_mask_has_the_bit_of_the_node_only(
  node, mask, num_bits, monkeypatch
):
  calls = []

  def record(*args):
    calls.append(args)
    return 0

  monkeypatch.setattr(numa, "_mbind", record)
  monkeypatch.setattr(numa, "memory_nodes", lambda: (node,))
  numa.bind(1 << 21, 4096, node)
  ((address, num_bytes, words, bits),) = calls
  assert (address, num_bytes, [*words], bits) == (1 << 21, 4096, mask, num_bits)
