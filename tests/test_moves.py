"""What the planner tries, by what the machine does."""

import dataclasses

import pytest

from sojax.plan.hardware import Curve
from sojax.plan.machines import MACHINES
from sojax.plan.plan import MIB
from sojax.planner.moves import (
  neighbours,
  pool_threads,
  seeds,
  transfer_bytes,
)
from sojax.planner.search import fits, search
from tests.planning import problem, profile


def link(rate, latency_s):
  """Bytes/s over bytes, where every transfer takes a latency."""
  sizes = [float(1 << power) for power in range(16, 31)]
  return Curve(tuple((x, x / (latency_s + x / rate)) for x in sizes))


def test_sizes_begin_at_half_the_knee_and_end_where_dispatch_is_little():
  """At 1e9 bytes/s 9 MB take nine times a latency of 1 ms, and that is 90 %.

  Relative to 1 GiB, at 99.9 %, it is a little less. Dispatch takes as long as
  67 kB do, and a fortieth of what 2.7 MB do.
  """
  of = profile(d2h=link(1e9, 1e-3), h2d=link(1e9, 1e-3), dispatch_s=6.7e-5)
  assert transfer_bytes(of) == (8 * MIB, 16 * MIB)
  slow = dataclasses.replace(of, dispatch_s=3e-3)  # 40 of them: 120 MB
  assert transfer_bytes(slow) == tuple(n * MIB for n in (8, 16, 32, 64, 128))


def test_the_slower_link_to_reach_its_knee_counts():
  of = profile(d2h=link(1e9, 1e-4), h2d=link(1e9, 1e-3), dispatch_s=6.7e-5)
  assert transfer_bytes(of) == (8 * MIB, 16 * MIB)


def test_no_transfer_is_tried_that_takes_less_than_its_dispatch():
  """The knee is at 128 KiB, and 10 MB take as long as dispatch."""
  of = profile(d2h=link(1e10, 1e-6), h2d=link(1e10, 1e-6), dispatch_s=1e-3)
  assert transfer_bytes(of) == tuple(
    n * MIB for n in (16, 32, 64, 128, 256, 512)
  )


def test_a_link_that_slows_down_past_its_best_has_its_knee_before_that():
  falling = Curve(((MIB, 2e9), (4 * MIB, 10e9), (64 * MIB, 1e9)))
  of = profile(d2h=falling, h2d=falling, dispatch_s=0.0)
  assert transfer_bytes(of) == (2 * MIB, 4 * MIB)


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_has_sizes_around_the_knee_of_its_links(name):
  of = MACHINES[name]
  sizes = transfer_bytes(of)
  assert list(sizes) == sorted({*sizes}) and len(sizes) >= 2
  knee = max(of.d2h.knee(), of.h2d.knee())
  assert sizes[0] <= 2 * knee and knee <= sizes[-1]


def test_plans_are_tried_with_the_sizes_of_the_machine_and_each_ranks_shard():
  of = problem()
  of = dataclasses.replace(
    of, workload=dataclasses.replace(of.workload, num_ranks=2)
  )
  sizes = {2 * size for size in transfer_bytes(of.profile)}
  plan = next(seeds(of))
  assert plan.bucket_bytes == max(sizes)
  found = {x.bucket_bytes for x in neighbours(of, plan, fine=True)}
  assert found == sizes


def rates(*points):
  return dict.fromkeys(profile().host_rates, Curve(points))


def test_fewer_threads_are_tried_only_where_that_can_be_faster():
  growing = profile(host_cores=8, host_rates=rates((1.0, 1e9), (8.0, 8e9)))
  assert pool_threads(growing) == ()
  assert pool_threads(MACHINES["gh200"]) == ()
  best_at_4 = rates((1.0, 1e9), (4.0, 4e9), (8.0, 3.9e9))
  assert pool_threads(profile(host_cores=8, host_rates=best_at_4)) == (
    4,
    7,
    None,
  )
  shared = dataclasses.replace(growing, device_is_host=True)
  assert pool_threads(shared) == (4, 7, None)
  assert pool_threads(dataclasses.replace(shared, host_cores=2)) == (1, None)
  assert pool_threads(dataclasses.replace(shared, host_cores=1)) == ()


def test_a_host_that_is_faster_with_fewer_threads_gets_fewer():
  on_host = {"device_buckets": 0}
  curve = rates((1.0, 1e10), (4.0, 4e10), (8.0, 1e10))
  of = problem(machine=profile(host_cores=8, host_rates=curve), forced=on_host)
  best = search(of).best
  assert best.plan.pool_threads == 4
  growing = rates((1.0, 1e10), (8.0, 8e10))
  of = problem(
    machine=profile(host_cores=8, host_rates=growing), forced=on_host
  )
  assert search(of).best.plan.pool_threads is None


def test_where_the_device_has_no_room_for_sums_the_host_adds_up():
  machine = profile(device_bytes=17 * 10**8)
  once = problem(machine=machine, num_stages=6)
  often = problem(machine=machine, num_stages=6, accumulation=2)
  assert fits(once) and fits(often)
  assert search(often).best.plan.accumulate == "host"
  on_device = problem(
    machine=machine, forced={"accumulate": "device"}, accumulation=2
  )
  assert not fits(on_device)


def test_where_the_host_is_too_small_whole_stages_are_on_the_device():
  """Of 6 stages of 2**26 parameters the host has room for 3."""
  machine = profile(host_bytes=30 * 10**8, device_bytes=45 * 10**8)
  of = problem(machine=machine, forced={"speculation": "wait"})
  best = search(of).best
  assert fits(of) and best.fits
  on_device = [b for b in best.layout.buckets if b.on_device]
  assert {bucket.stage for bucket in on_device} == {0, 1, 2}
  assert set(best.plan.weights) == {"stationary", "flow"}
  smaller = dataclasses.replace(machine, device_bytes=40 * 10**8)
  assert not fits(dataclasses.replace(of, profile=smaller))
  forced = {"speculation": "wait", "device_buckets": 0}
  assert not fits(problem(machine=machine, forced=forced))
