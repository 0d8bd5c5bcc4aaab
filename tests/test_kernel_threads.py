"""Pools: their instruction sets, threads and cores."""

import contextlib
import ctypes
import os
import pathlib
import platform
import subprocess
import sys
import threading
import time

import pytest

from sojax.host import kernels
from sojax.host.kernels import Pool
from tests.kernel_cases import (
  BF16,
  GRAD_SCALE,
  ISAS,
  SCALARS,
  SUM_METHODS,
  SumState,
  assert_refused,
  assert_same_state,
  assert_same_sums,
  random_state,
  random_sums,
)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 only")
def test_the_instruction_sets_are_those_of_the_cpu():
  info = kernels.cpu_info()
  text = pathlib.Path("/proc/cpuinfo").read_text()
  flags = set(next(x for x in text.splitlines() if "flags" in x).split())
  expected = []
  if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
    expected.append("avx512")
  if {"avx2", "fma", "f16c"} <= flags:
    expected.append("avx2")
  assert info.isas == (*expected, "scalar")
  assert info.isa == info.isas[0]
  bits = {"avx512": 512, "avx2": 256, "scalar": 32}
  assert info.vector_bits == bits[info.isa]
  assert info.cores == len(os.sched_getaffinity(0))


@pytest.mark.skipif(platform.machine() != "aarch64", reason="Arm only")
def test_the_instruction_sets_are_those_of_the_arm_cpu():
  info = kernels.cpu_info()
  get_vector_length = 51  # PR_SVE_GET_VL
  state = ctypes.CDLL(None).prctl(get_vector_length, 0, 0, 0, 0)
  has_sve = state >= 0
  assert info.isas == (*(["sve"] * has_sve), "neon", "scalar")
  assert info.isa == info.isas[0]
  # The low half of the state is the length in bytes.
  length = 8 * (state & 0xFFFF)
  bits = max(x for x in (128, 256, 512) if x <= length) if has_sve else 128
  assert info.vector_bits == bits


def test_a_pool_says_what_it_uses():
  for isa in ISAS:
    with Pool(1, isa=isa) as pool:
      assert (pool.isa, pool.num_threads, pool.cores) == (isa, 1, None)
  with Pool(2) as pool:
    assert pool.isa == ISAS[0]


# Every machine lacks the best of the other kind.
_MISSING = "avx512" if platform.machine() == "aarch64" else "sve"


@pytest.mark.parametrize("isa", [_MISSING, "AVX2", "", "best"])
def test_a_missing_instruction_set_is_an_error_that_names_the_others(isa):
  with pytest.raises(ValueError, match=f"isa='{isa}'.*'scalar'"):
    Pool(1, isa=isa)


@pytest.mark.parametrize("num_threads", [0, -1, 1025])
def test_the_number_of_threads_has_bounds(num_threads):
  with pytest.raises(ValueError, match=f"num_threads={num_threads}"):
    Pool(num_threads)


def test_cores_are_checked():
  allowed = sorted(os.sched_getaffinity(0))
  with pytest.raises(ValueError, match="2 cores for 1 threads"):
    Pool(1, cores=(0, 1))
  with pytest.raises(ValueError, match="different"):
    Pool(2, cores=(allowed[0], allowed[0]))
  with pytest.raises(ValueError, match="those of this process"):
    Pool(1, cores=(allowed[-1] + 1,))


def workers():
  """The threads of all pools of this process: their ids."""
  found = set()
  for task in pathlib.Path("/proc/self/task").iterdir():
    # One may end between the listing and the look at it.
    with contextlib.suppress(OSError):
      if (task / "comm").read_text().startswith("sojax-"):
        found.add(int(task.name))
  return found


def workers_after_a_while(expected):
  """The same; the system may list a thread for a moment after it is joined."""
  deadline = time.monotonic() + 10
  while (found := workers()) != expected and time.monotonic() < deadline:
    os.sched_yield()
  return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_pools_work_at_once_on_disjoint_cores():
  cores = sorted(os.sched_getaffinity(0))[:2]
  states = [random_state(50_001, BF16, BF16, seed=i) for i in range(2)]
  expected = [state.copy() for state in states]
  others = workers()
  pools = [Pool(1, cores=[core]) for core in cores]
  bound = [os.sched_getaffinity(x) for x in sorted(workers() - others)]
  assert bound == [{core} for core in cores]

  def work(pool, state):
    for _ in range(20):
      pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)

  threads = [
    threading.Thread(target=work, args=args)
    for args in zip(pools, states, strict=True)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for pool in pools:
    pool.close()
  for state, twin in zip(states, expected, strict=True):
    for _ in range(20):
      twin = twin.twin()
    assert_same_state(state, twin)


def test_callers_of_one_pool_take_turns():
  states = [random_state(10_001, seed=i) for i in range(2)]
  expected = [state.twin().twin().twin() for state in states]
  sums = [random_sums(10_001, seed=i) for i in range(2)]
  expected_sums = sums
  for _ in range(3):
    expected_sums = [state.twin("accumulate") for state in expected_sums]
  with Pool(2) as pool:

    def work(state):
      for _ in range(3):
        if isinstance(state, SumState):
          pool.accumulate([state.segment()])
        else:
          pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)

    threads = [
      threading.Thread(target=work, args=(x,)) for x in (*states, *sums)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  for state, twin in zip(states, expected, strict=True):
    assert_same_state(state, twin)
  for state, twin in zip(sums, expected_sums, strict=True):
    assert_same_sums(state, twin)


@pytest.mark.parametrize("kernel", ["adamw_step", *SUM_METHODS])
def test_another_thread_runs_python_during_a_call(kernel):
  step, sums = random_state(1 << 20), random_sums(1 << 20)
  gate, ran = threading.Lock(), threading.Event()
  gate.acquire()

  def wait_then_run():
    with gate:
      ran.set()

  thread = threading.Thread(target=wait_then_run)
  thread.start()
  interval = sys.getswitchinterval()
  # From here on nobody gets the GIL unless its owner lets go of it.
  sys.setswitchinterval(1000)
  try:
    with Pool(1) as pool:
      gate.release()
      for _ in range(1000):
        if kernel == "adamw_step":
          pool.adamw_step([step.segment()], SCALARS, 1.0)
        else:
          getattr(pool, kernel)([sums.segment()])
        if ran.is_set():
          break
      assert ran.is_set()
  finally:
    sys.setswitchinterval(interval)
  thread.join()


def test_closing_ends_the_threads():
  before = workers()
  pool = Pool(3)
  assert len(workers() - before) == 3
  pool.close()
  assert workers_after_a_while(before) == before
  pool.close()
  step, sums = random_state(3), random_sums(3)
  for state, call in (
    (step, lambda: pool.adamw_step([step.segment()], SCALARS, 1.0)),
    (sums, lambda: pool.widen([sums.segment()])),
    (sums, lambda: pool.accumulate([sums.segment()])),
  ):
    assert_refused(call, [state], ValueError, "closed")
  Pool(2)  # nobody keeps it
  assert workers_after_a_while(before) == before


def test_a_forked_child_gets_an_error_instead_of_a_hang():
  program = """
import os, numpy as np
from sojax.host.kernels import Pool, Segment
from sojax.plan.adamw import adam_scalars, adamw
pool = Pool(2)
child = os.fork()
if child == 0:
  arrays = [np.zeros(3, np.float32) for _ in range(4)]
  try:
    pool.adamw_step([Segment(*arrays)], adam_scalars(adamw(1e-3), 0), 1.0)
  except RuntimeError as error:
    assert "fork" in str(error)
    pool.close()
    os._exit(7)
  os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
  subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
