"""Operations that are submitted and waited for later.

Oracle: the NumPy twins, applied in the order of submission.
"""

import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from sojax.host.kernels import Pool
from sojax.host.operations import (
  Accumulate,
  AdamwStep,
  Narrow,
  Norm,
  RecordStep,
  Redo,
  Undo,
  Widen,
)
from sojax.host.record import new_record
from sojax.host.segments import NarrowSegment, NormSegment
from sojax.reference.accumulate import chunk_sums_of_squares
from tests.kernel_cases import (
  BF16,
  F32,
  GRAD_SCALE,
  SCALARS,
  Layout,
  assert_refused,
  assert_same_floats,
  assert_same_state,
  assert_same_sums,
  every_isa,
  random_state,
  random_sums,
  state_of,
)

LARGE = 1 << 21  # so large that the queue is still full when tests look


def step(state):
  return AdamwStep([state.segment()], SCALARS, GRAD_SCALE)


@every_isa
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_what_shares_no_array_may_be_in_flight_together(isa, num_threads):
  states = [
    state_of(layout, n, seed=n)
    for n, layout in enumerate([Layout(F32), Layout(BF16, BF16)] * 10, 20_000)
  ]
  expected = [state.twin() for state in states]
  with Pool(num_threads, isa=isa) as pool:
    completions = [pool.submit(step(state)) for state in states]
    for completion in reversed(completions):
      completion.wait()
      assert completion.done()
  for state, twin in zip(states, expected, strict=True):
    assert_same_state(state, twin)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_what_shares_arrays_is_done_in_order(num_threads):
  # Each operation reads or writes what the one before it left.
  state = random_state(70_001, F32, with_sum=True, with_squares=True)
  sums = random_sums(70_001, BF16)
  sums.total = state.sum
  weight = np.zeros(state.p.size, BF16)
  sumsq = np.zeros_like(state.sumsq)
  expected_sums, expected = sums, state.copy()
  with Pool(num_threads) as pool:
    for round_ in range(10):
      method, operation = (
        ("widen", Widen) if round_ == 0 else ("accumulate", Accumulate)
      )
      last = [
        pool.submit(operation([sums.segment()])),
        pool.submit(step(state)),
        pool.submit(Narrow([NarrowSegment(state.p, weight)])),
        pool.submit(Norm([NormSegment(state.grad, sumsq, state.sum)])),
      ]
      expected_sums = expected_sums.twin(method)
      expected.sum = expected_sums.total
      expected = expected.twin()
    assert all(x.wait() is None for x in last)
  assert_same_sums(sums, expected_sums)
  assert_same_state(state, expected)
  assert_same_floats(sumsq, chunk_sums_of_squares(expected.whole_grad()))
  np.testing.assert_array_equal(
    weight.view(np.uint16), rounded(expected.p).view(np.uint16)
  )


@pytest.mark.parametrize("num_threads", [2, 3])
def test_what_reads_an_array_does_not_overtake_what_writes_it(num_threads):
  # One thread steps the last piece while the others have nothing left but to
  # round the end of it. What comes first keeps all from starting too soon.
  first = random_state(1 << 18, seed=2)
  filler, shared = random_state(1 << 14), random_state(1 << 16, seed=1)
  end = slice(-1000, None)
  weight = np.zeros(1000, F32)
  with Pool(num_threads) as pool:
    for round_ in range(300):
      # Of many lengths, so that threads come to the end apart.
      part = filler.map(lambda x, n=50 * round_: x[:n])
      segments = [part.segment(), shared.segment()]
      completions = [
        pool.submit(step(first)),
        pool.submit(AdamwStep(segments, SCALARS, GRAD_SCALE)),
        pool.submit(Narrow([NarrowSegment(shared.p[end], weight)])),
      ]
      for completion in completions:
        completion.wait()
      assert weight.tobytes() == shared.p[end].tobytes()


def rounded(p):
  weight = np.zeros(p.size, BF16)
  with Pool(1) as pool:
    pool.submit(Narrow([NarrowSegment(p, weight)])).wait()
  return weight


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_record_is_taken_and_used_without_waiting(num_threads):
  original = random_state(100_003, BF16, BF16)
  state = original.copy()
  record = new_record([state.p.size], escape_bytes_per_param=0.01)
  segments = [state.segment()]
  with Pool(num_threads) as pool:
    for _ in range(5):
      pool.submit(RecordStep(segments, SCALARS, GRAD_SCALE, record))
      pool.submit(Undo(segments, record))
    pool.submit(RecordStep(segments, SCALARS, GRAD_SCALE, record))
    pool.submit(Redo(segments, record, 0.25)).wait()
  assert_same_state(state, original.twin(grad_scale=0.25))


def test_submitting_does_not_wait():
  states = [random_state(LARGE, seed=i) for i in range(8)]
  with Pool(1) as pool:
    completions = [pool.submit(step(state)) for state in states]
    assert not completions[-1].done()
    completions[-1].wait()
    # In the order of submission, on one thread.
    assert all(x.done() for x in completions)


def test_waiting_lets_others_run_python():
  states = [random_state(LARGE, seed=i) for i in range(4)]
  ran = threading.Event()
  interval = sys.getswitchinterval()
  sys.setswitchinterval(1000)
  thread = threading.Thread(target=ran.set)
  try:
    with Pool(1) as pool:
      for _ in range(100):
        completion = [pool.submit(step(state)) for state in states][-1]
        if not thread.ident:
          thread.start()
        completion.wait()
        if ran.is_set():
          break
    assert ran.is_set()
  finally:
    sys.setswitchinterval(interval)
  thread.join()


def test_several_threads_wait_for_one():
  state = random_state(LARGE)
  done = []
  with Pool(2) as pool:
    completion = pool.submit(step(state))

    def wait():
      completion.wait()
      done.append(completion.done())

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert done == [True] * 4


def test_what_nobody_waits_for_is_done_all_the_same():
  states = [random_state(LARGE // 4, seed=i) for i in range(4)]
  expected = [state.twin() for state in states]
  pool = Pool(2)
  for state in states:
    pool.submit(step(state))  # dropped at once
  pool.close()
  for state, twin in zip(states, expected, strict=True):
    assert_same_state(state, twin)


def test_arrays_live_until_the_operation_ends():
  before = random_state(LARGE // 4)
  expected = before.twin()
  state = before.copy()
  p = state.p
  gone = weakref.ref(state.mu)
  with Pool(1) as pool:
    for _ in range(4):
      pool.submit(step(random_state(LARGE // 4, seed=1)))
    completion = pool.submit(step(state))
    del state
    gc.collect()
    assert gone() is not None
    completion.wait()
    # And not longer.
    assert gone() is None
  assert_same_floats(p, expected.p)


def test_a_pool_that_nobody_keeps_ends_its_work_first():
  state = random_state(LARGE // 4)
  expected = state.twin()
  completion = Pool(2).submit(step(state))
  completion.wait()
  assert_same_state(state, expected)


def test_a_failure_is_raised_where_it_is_awaited_and_only_there():
  state = random_state(1000)
  state.grad *= 1000
  record = new_record([1000], escape_bytes_per_param=12)
  other = random_state(1000, seed=1)
  expected = other.twin()
  with Pool(2) as pool:
    segments = [state.segment()]
    pool.submit(RecordStep(segments, SCALARS, GRAD_SCALE, record)).wait()
    record.offsets[0] = 10**9
    failing = pool.submit(Undo(segments, record))
    following = pool.submit(step(other))
    following.wait()
    for _ in range(2):
      with pytest.raises(RuntimeError, match="damaged"):
        failing.wait()
    assert failing.done()
  assert_same_state(other, expected)


def test_a_refused_operation_leaves_the_queue_alone():
  state, faulty = random_state(50_001), random_state(9)
  expected = state.twin()
  with Pool(2) as pool:
    completion = pool.submit(step(state))
    faulty.mu = faulty.p
    assert_refused(
      lambda: pool.submit(step(faulty)), [faulty], ValueError, "overlap"
    )
    completion.wait()
  assert_same_state(state, expected)


def test_nothing_to_do_is_done_at_once():
  with Pool(1) as pool:
    completion = pool.submit(AdamwStep([], SCALARS, 1.0))
    assert completion.done()
    completion.wait()


def test_a_closed_pool_refuses_and_has_done_the_rest():
  state = random_state(LARGE // 4)
  expected = state.twin()
  pool = Pool(1)
  completion = pool.submit(step(state))
  pool.close()
  assert completion.done()
  completion.wait()
  assert_same_state(state, expected)
  with pytest.raises(ValueError, match="closed"):
    pool.submit(step(state))
  with pytest.raises(ValueError, match="closed"):
    pool.bind_to_cores(sorted(os.sched_getaffinity(0))[:1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_move_to_other_cores():
  first, second = sorted(os.sched_getaffinity(0))[:2]
  state = random_state(1000)
  expected = state.twin().twin()
  with Pool(1, cores=[first]) as pool:
    pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)
    assert pool_affinity() == [{first}]
    pool.bind_to_cores([second])
    assert pool_affinity() == [{second}] and pool.cores == (second,)
    pool.adamw_step([state.segment()], SCALARS, GRAD_SCALE)
    with pytest.raises(ValueError, match="2 cores for 1 threads"):
      pool.bind_to_cores([first, second])
    assert pool_affinity() == [{second}]
  assert_same_state(state, expected)


def pool_affinity():
  affinities = []
  for task in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{task}/comm") as file:
      if file.read().startswith("sojax-"):
        affinities.append(os.sched_getaffinity(int(task)))
  return affinities


def test_a_forked_child_gets_an_error_instead_of_a_hang():
  program = """
import os, numpy as np
from sojax.host.kernels import Pool
from sojax.host.operations import AdamwStep
from sojax.host.segments import Segment
from sojax.plan.adamw import adam_scalars, adamw
pool = Pool(1)
def submit():
  arrays = [np.zeros(1 << 22, np.float32) for _ in range(4)]
  scalars = adam_scalars(adamw(1e-3), 0)
  return pool.submit(AdamwStep([Segment(*arrays)], scalars, 1.0))
completions = [submit() for _ in range(8)]
child = os.fork()
if child == 0:
  try:
    completions[-1].wait()
  except RuntimeError as error:
    assert "fork" in str(error)
    del pool
    os._exit(7)
  os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
  subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
