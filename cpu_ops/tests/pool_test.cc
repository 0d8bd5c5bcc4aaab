// What Python cannot see of the pool and what it runs: exceptions of a job and
// races (with TSan). Prints the first fault and returns 1.
#include "../pool.h"

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "../dispatch.h"
#include "../rollback.h"
#include "../update.h"
#include "testing.h"

namespace sojax {
namespace {

std::shared_ptr<Job> MakeJob(std::size_t num_items,
                             std::function<void(std::size_t, std::size_t)> run,
                             std::vector<Extent> extents = {}) {
  return std::make_shared<Job>(num_items, std::move(run), std::move(extents));
}

void RunItems(Pool& pool, Items items) {
  const auto job = MakeJob(items.num_items, std::move(items.run));
  pool.Submit(job);
  job->Wait();
  CHECK(job->IsDone());
}

void TestEveryItemRunsOnceOnTheThreadItIsToldOf() {
  Pool pool(3, {});
  CHECK(pool.num_threads() == 3);
  std::vector<std::thread::id> ids(3);
  for (int run = 0; run < 200; ++run) {
    std::vector<int> counts(20);
    RunItems(pool, {counts.size(), [&](std::size_t item, std::size_t thread) {
                      ++counts[item];
                      if (ids[thread] == std::thread::id()) {
                        ids[thread] = std::this_thread::get_id();
                      }
                      CHECK(ids[thread] == std::this_thread::get_id());
                    }});
    CHECK(counts == std::vector<int>(20, 1));
  }
}

void TestAnExceptionReachesTheWaiterAndThePoolLivesOn() {
  Pool pool(2, {});
  for (std::size_t thrower = 0; thrower < 5; ++thrower) {
    const auto job = MakeJob(5, [&](std::size_t item, std::size_t) {
      if (item == thrower) throw std::runtime_error("broken");
    });
    pool.Submit(job);
    for (int wait = 0; wait < 2; ++wait) {
      CHECK(MessageOf<std::runtime_error>([&] { job->Wait(); }) == "broken");
    }
  }
  const auto all = MakeJob(
      100, [](std::size_t, std::size_t) { throw std::runtime_error("all"); });
  pool.Submit(all);
  CHECK(MessageOf<std::runtime_error>([&] { all->Wait(); }) == "all");
  std::atomic<int> count{0};
  RunItems(pool, {2, [&](std::size_t, std::size_t) { ++count; }});
  CHECK(count == 2);
}

void TestJobsThatShareBytesTakeTurns() {
  Pool pool(3, {});
  int sum = 0;  // a race, unless they do
  const auto start = reinterpret_cast<std::uintptr_t>(&sum);
  const Extent written = {start, start + sizeof(sum), true};
  Extent read = written;
  read.written = false;
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 300; ++i) {
    const bool writes = i % 3 == 0;
    jobs.push_back(MakeJob(writes ? 1 : 4,
                           [&sum, i, writes](std::size_t, std::size_t) {
                             if (writes) {
                               CHECK(sum == i / 3);
                               ++sum;
                             } else {
                               CHECK(sum == i / 3 + 1);
                             }
                           },
                           {writes ? written : read}));
    pool.Submit(jobs.back());
  }
  jobs.back()->Wait();
  CHECK(sum == 100);
  for (const auto& job : jobs) job->Wait();
}

// The second job ends although an item of the first waits for it.
void TestAThreadWithNothingLeftGoesOnToTheNextJob() {
  Pool pool(2, {});
  const auto second = MakeJob(1, [](std::size_t, std::size_t) {});
  const auto first =
      MakeJob(1, [&](std::size_t, std::size_t) { second->Wait(); });
  pool.Submit(first);
  pool.Submit(second);
  first->Wait();
  CHECK(second->IsDone());
}

void TestSeveralSubmitAndWaitAtOnce() {
  Pool pool(2, {});
  std::atomic<int> count{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int run = 0; run < 100; ++run) {
        RunItems(pool, {3, [&](std::size_t, std::size_t) { ++count; }});
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(count == 900);
}

void TestAJobOutlivesItsPool() {
  std::atomic<int> count{0};
  std::vector<std::shared_ptr<Job>> jobs;
  {
    Pool pool(2, {});
    for (int i = 0; i < 50; ++i) {
      jobs.push_back(MakeJob(10, [&](std::size_t, std::size_t) { ++count; }));
      pool.Submit(jobs.back());
    }
  }
  CHECK(count == 500);
  for (const auto& job : jobs) job->Wait();
}

void TestAClosedPoolRefuses() {
  Pool pool(2, {});
  pool.Close();
  pool.Close();
  CHECK(MessageOf<std::invalid_argument>([&] {
          pool.Submit(MakeJob(1, [](std::size_t, std::size_t) {}));
        }).find("closed") != std::string::npos);
  CHECK(MessageOf<std::invalid_argument>([&] {
          pool.BindToCores({0, 0});
        }).find("closed") != std::string::npos);
}

void TestConflictIsAByteThatOneOfThemWrites() {
  // All layouts of three extents in eight bytes, of one list and another.
  const auto conflict = [](const Extent& a, const Extent& b) {
    return (a.written || b.written) && a.start < b.end && b.start < a.end;
  };
  std::vector<Extent> all;
  for (std::uintptr_t start = 1; start < 7; ++start) {
    for (std::uintptr_t end = start + 1; end <= 7; end += 2) {
      all.push_back({start, end, true});
      all.push_back({start, end, false});
    }
  }
  for (const Extent& a : all) {
    CHECK(!Conflict({a}, {}) && !Conflict({}, {a}));
    for (const Extent& b : all) {
      for (const Extent& c : all) {
        std::vector<Extent> list = {a, b};
        SortExtents(list);
        const bool expected = conflict(a, c) || conflict(b, c);
        CHECK(Conflict(list, {c}) == expected);
        CHECK(Conflict({c}, list) == expected);
      }
    }
  }
}

void TestCoresAreBoundOrRefused() {
  cpu_set_t allowed;
  CHECK(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  int core = 0;
  while (!CPU_ISSET(static_cast<std::size_t>(core), &allowed)) ++core;
  Pool pool(1, {core});
  RunItems(pool, {1, [&](std::size_t, std::size_t) {
                    cpu_set_t set;
                    CHECK(sched_getaffinity(0, sizeof(set), &set) == 0);
                    CHECK(CPU_COUNT(&set) == 1);
                    CHECK(CPU_ISSET(static_cast<std::size_t>(core), &set));
                  }});
  CHECK(!MessageOf<std::invalid_argument>([&] { Pool(2, {core}); }).empty());
  CHECK(!MessageOf<std::invalid_argument>([] { Pool(1, {-1}); }).empty());
  CHECK(!MessageOf<std::invalid_argument>([] { Pool(1, {1 << 20}); }).empty());
  // The first thread starts before the second turns out to be impossible.
  CHECK(!MessageOf<std::system_error>([&] {
           Pool(2, {core, CPU_SETSIZE - 1});
         }).empty());
}

constexpr Layout kHalfLayout = {GradType::kBfloat16, MasterType::kFloat32,
                                WeightType::kBfloat16};

void TestAnUpdateEqualsOneStepPerSegment() {
  const KernelTable& kernels = *AvailableKernels().front();
  const std::size_t layout = FindLayout(kHalfLayout);
  for (std::size_t num_threads = 1; num_threads <= 3; ++num_threads) {
    Pool pool(num_threads, {});
    std::vector<std::unique_ptr<State>> actual;
    std::vector<std::unique_ptr<State>> expected;
    std::vector<AdamSegment> segments;
    for (std::size_t n : {0, 1, 5000, 70001, 63, 4096}) {
      actual.push_back(std::make_unique<State>(n, 2, 0.1f));
      expected.push_back(std::make_unique<State>(n, 0, 0.1f));
      segments.push_back(actual.back()->Segment(layout, true));
      Step(kernels, expected.back()->Segment(layout, true));
    }
    RunItems(pool, StepItems(kernels, kParams, segments, num_threads));
    for (std::size_t i = 0; i < actual.size(); ++i) {
      CHECK(*actual[i] == *expected[i]);
    }
  }
}

void TestSumsEqualOneCallPerSegment() {
  const KernelTable& kernels = *AvailableKernels().front();
  Pool pool(2, {});
  for (bool adds : {false, true}) {
    std::vector<std::unique_ptr<State>> actual;
    std::vector<std::unique_ptr<State>> expected;
    std::vector<AccumulateSegment> segments;
    for (std::size_t n : {0, 1, 5000, 70001, 63, 4096}) {
      actual.push_back(std::make_unique<State>(n, 2, 0.1f));
      expected.push_back(std::make_unique<State>(n, 0, 0.1f));
      segments.push_back(actual.back()->SumSegment(GradType::kFloat16, true));
      Sum(kernels, adds, expected.back()->SumSegment(GradType::kFloat16, true));
    }
    const auto items = adds ? &AccumulateItems : &WidenItems;
    RunItems(pool, items(kernels, segments, 2));
    for (std::size_t i = 0; i < actual.size(); ++i) {
      CHECK(*actual[i] == *expected[i]);
    }
  }
}

// Records the step of several segments on one number of threads and takes it
// back on another, with room for `capacity` escapes.
void RecordAndTakeBack(std::size_t capacity, bool redo) {
  const KernelTable& kernels = *AvailableKernels().front();
  const std::size_t layout = FindLayout(kHalfLayout);
  std::vector<std::unique_ptr<State>> states;
  std::vector<std::unique_ptr<State>> expected;
  std::vector<AdamSegment> segments;
  std::size_t num_bytes = 0;
  std::size_t num_chunks = 0;
  for (std::size_t n : {0, 1, 40000, 63, 16384, 100000}) {
    states.push_back(std::make_unique<State>(n, 2, 0.1f));
    expected.push_back(std::make_unique<State>(n, 2, 0.1f));
    segments.push_back(states.back()->Segment(layout, true));
    num_bytes += CodesBytes(RecordForm::kTwoBytes, n);
    num_chunks += NumRecordChunks(n);
  }
  RecordBlock codes(RecordForm::kTwoBytes, num_bytes / 2);
  std::vector<float> escapes(capacity);
  std::vector<std::int64_t> offsets(num_chunks + 1);
  const Record record = {RecordForm::kTwoBytes, codes.codes, escapes.data(),
                         capacity, offsets.data()};
  Pool pool(3, {});
  Pool other_pool(2, {});
  RunItems(pool, RecordItems(kernels, kParams, segments, record,
                             std::make_shared<const Scratch>(3)));
  AdamParams again = kParams;
  again.grad_scale = 0.25f;
  RunItems(other_pool,
           redo ? RedoItems(kernels, kParams, 0.25f, segments, record)
                : UndoItems(kernels, kParams, segments, record));
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (redo) {
      AdamSegment segment = expected[i]->Segment(layout, true);
      kernels.layouts[layout].step(again, segment.buffers, segment.num_elems);
      CHECK(*states[i] == *expected[i]);
    } else {
      CHECK(SameState(*states[i], *expected[i], segments[i]));
    }
  }
}

void TestRecordedSegmentsComeBack() {
  for (std::size_t capacity : {0, 1000, 100000, 1000000}) {
    RecordAndTakeBack(capacity, false);
    RecordAndTakeBack(capacity, true);
  }
}

}  // namespace
}  // namespace sojax

int main() {
  sojax::TestEveryItemRunsOnceOnTheThreadItIsToldOf();
  sojax::TestAnExceptionReachesTheWaiterAndThePoolLivesOn();
  sojax::TestJobsThatShareBytesTakeTurns();
  sojax::TestAThreadWithNothingLeftGoesOnToTheNextJob();
  sojax::TestSeveralSubmitAndWaitAtOnce();
  sojax::TestAJobOutlivesItsPool();
  sojax::TestAClosedPoolRefuses();
  sojax::TestConflictIsAByteThatOneOfThemWrites();
  sojax::TestCoresAreBoundOrRefused();
  sojax::TestAnUpdateEqualsOneStepPerSegment();
  sojax::TestSumsEqualOneCallPerSegment();
  sojax::TestRecordedSegmentsComeBack();
  return 0;
}
