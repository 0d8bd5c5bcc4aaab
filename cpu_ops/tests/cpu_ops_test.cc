// What Python cannot see of the kernels and the pool: exceptions of a task,
// the floating-point mode after a kernel, reads past an array (with ASan) and
// races (with TSan). Prints the first fault and returns 1.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "../dispatch.h"
#include "../fp_mode.h"
#include "../pool.h"
#include "../update.h"

namespace sojax {
namespace {

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

template <class Error, class Function>
std::string MessageOf(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

const AdamParams kParams = {0.9f,  0.95f,  0.1f,   0.05f, 2.0f,
                            1e-9f, -1e-3f, -1e-4f, 1e-8f, 0.5f};

// A heap block of exactly n elements that starts `offset` bytes past an
// address that malloc aligned; ASan watches both of its ends.
template <class T>
class Block {
 public:
  Block(std::size_t n, std::size_t offset)
      : offset_(offset), memory_(offset + n * sizeof(T)) {}
  T* data() { return reinterpret_cast<T*>(memory_.data() + offset_); }
  void Set(std::size_t i, T value) {
    std::memcpy(memory_.data() + offset_ + i * sizeof(T), &value, sizeof(T));
  }
  bool operator==(const Block& other) const {
    return std::equal(begin(), memory_.end(), other.begin(),
                      other.memory_.end());
  }

 private:
  auto begin() const {
    return memory_.begin() + static_cast<std::ptrdiff_t>(offset_);
  }

  std::size_t offset_;
  std::vector<unsigned char> memory_;
};

// A segment with numbers in it, some of them subnormal.
struct State {
  State(std::size_t n, std::size_t offset, float scale)
      : p(n, offset),
        mu(n, offset),
        nu(n, offset),
        grad(n, offset),
        grad_half(n, offset),
        weight(n, offset),
        weight_half(n, offset),
        sumsq(NumChunks(n), offset),
        num_elems(n) {
    for (std::size_t i = 0; i < n; ++i) {
      const float x = scale * static_cast<float>(i % 17 + 1);
      p.Set(i, x);
      mu.Set(i, -x);
      nu.Set(i, x);
      grad.Set(i, x);
      grad_half.Set(i, static_cast<std::uint16_t>(0x3f00 + i));
    }
  }

  AdamSegment Segment(GradType grad_type, WeightType weight_type) {
    void* weight_data = weight_half.data();
    if (weight_type == WeightType::kNone) weight_data = nullptr;
    if (weight_type == WeightType::kFloat32) weight_data = weight.data();
    return {{p.data(), mu.data(), nu.data(), GradData(grad_type), weight_data},
            num_elems,
            grad_type,
            weight_type};
  }

  // Adds to p, and writes sums of squares if `squares`.
  AccumulateSegment SumSegment(GradType grad_type, bool squares) {
    return {{p.data(), GradData(grad_type), squares ? sumsq.data() : nullptr},
            num_elems,
            grad_type};
  }

  const void* GradData(GradType grad_type) {
    if (grad_type == GradType::kFloat32) return grad.data();
    return grad_half.data();
  }

  bool operator==(const State& other) const {
    return p == other.p && mu == other.mu && nu == other.nu &&
           grad == other.grad && weight == other.weight &&
           weight_half == other.weight_half && sumsq == other.sumsq;
  }

  Block<float> p, mu, nu, grad;
  Block<std::uint16_t> grad_half;
  Block<float> weight;
  Block<std::uint16_t> weight_half;
  Block<double> sumsq;
  std::size_t num_elems;
};

void Step(const KernelTable& kernels, const AdamSegment& segment) {
  kernels.adam_step[static_cast<std::size_t>(segment.grad_type)]
                   [static_cast<std::size_t>(segment.weight_type)](
                       kParams, segment.buffers, segment.num_elems);
}

template <class Function>
void ForEachInstance(const Function& function) {
  for (const KernelTable* kernels : AvailableKernels()) {
    for (std::size_t grad = 0; grad < kNumGradTypes; ++grad) {
      for (std::size_t weight = 0; weight < kNumWeightTypes; ++weight) {
        function(*kernels, static_cast<GradType>(grad),
                 static_cast<WeightType>(weight));
      }
    }
  }
}

void Sum(const KernelTable& kernels, bool adds,
         const AccumulateSegment& segment) {
  const auto& functions = adds ? kernels.accumulate : kernels.widen;
  functions[static_cast<std::size_t>(segment.grad_type)](segment.buffers,
                                                         segment.num_elems);
}

template <class Function>
void ForEachSumInstance(const Function& function) {
  for (const KernelTable* kernels : AvailableKernels()) {
    for (std::size_t grad = 0; grad < kNumGradTypes; ++grad) {
      for (bool adds : {false, true}) {
        for (bool squares : {false, true}) {
          function(*kernels, static_cast<GradType>(grad), adds, squares);
        }
      }
    }
  }
}

void TestEveryLengthAndOffsetEqualsTheScalarTwin() {
  ForEachInstance([](const KernelTable& kernels, GradType grad_type,
                     WeightType weight_type) {
    for (std::size_t n = 0; n <= 65; ++n) {
      for (std::size_t offset : {0, 1, 2, 4, 6, 12, 20, 32}) {
        State actual(n, offset, 0.1f);
        State expected(n, 0, 0.1f);
        Step(kernels, actual.Segment(grad_type, weight_type));
        Step(kScalarKernels, expected.Segment(grad_type, weight_type));
        CHECK(actual == expected);
      }
    }
  });
}

void TestSumsOfEveryLengthAndOffsetEqualTheScalarTwin() {
  ForEachSumInstance([](const KernelTable& kernels, GradType grad_type,
                        bool adds, bool squares) {
    const auto check = [&](std::size_t n, std::size_t offset) {
      State actual(n, offset, 0.1f);
      State expected(n, 0, 0.1f);
      Sum(kernels, adds, actual.SumSegment(grad_type, squares));
      Sum(kScalarKernels, adds, expected.SumSegment(grad_type, squares));
      CHECK(actual == expected);
    };
    for (std::size_t n = 0; n <= 49; ++n) {
      for (std::size_t offset : {0, 1, 2, 4, 6, 12, 20, 32}) check(n, offset);
    }
    for (std::size_t n : {4095, 4096, 4097, 8199}) check(n, 2);
  });
}

#if defined(__x86_64__)
// Flush to zero, denormals are zero, round down, a sticky flag.
constexpr FpWord kStrangeFpMode = 0x1f80 | 0x8040 | 0x2000 | 0x0020;
#else
// Flush to zero, default NaN, round down, a sticky flag.
constexpr FpWord kStrangeFpMode =
    (1u << 24) | (1u << 25) | (2u << 22) | (FpWord{1} << 33);
#endif

// Calls the function in a strange mode, which it must leave alone.
template <class Function>
void InStrangeFpMode(const Function& function) {
  const FpWord before = ReadFpMode();
  WriteFpMode(kStrangeFpMode);
  function();
  const FpWord after = ReadFpMode();
  WriteFpMode(before);
  CHECK(after == kStrangeFpMode);
}

void TestTheModeOfTheCallerDoesNotMatterAndIsPutBack() {
  ForEachInstance([](const KernelTable& kernels, GradType grad_type,
                     WeightType weight_type) {
    State actual(101, 0, 1e-39f);
    State expected(101, 0, 1e-39f);
    Step(kScalarKernels, expected.Segment(grad_type, weight_type));
    const AdamSegment segment = actual.Segment(grad_type, weight_type);
    InStrangeFpMode([&] { Step(kernels, segment); });
    CHECK(actual == expected);
  });
  ForEachSumInstance([](const KernelTable& kernels, GradType grad_type,
                        bool adds, bool squares) {
    State actual(101, 0, 1e-39f);
    State expected(101, 0, 1e-39f);
    Sum(kScalarKernels, adds, expected.SumSegment(grad_type, squares));
    const AccumulateSegment segment = actual.SumSegment(grad_type, squares);
    InStrangeFpMode([&] { Sum(kernels, adds, segment); });
    CHECK(actual == expected);
  });
}

void TestAPoolRunsEveryIndexOnItsOwnThread() {
  Pool pool(3, {});
  CHECK(pool.num_threads() == 3);
  std::vector<std::thread::id> ids(3);
  pool.Run([&](std::size_t i) { ids[i] = std::this_thread::get_id(); });
  CHECK(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
  std::vector<int> counts(3);
  for (int run = 0; run < 500; ++run) {
    pool.Run([&](std::size_t i) {
      CHECK(std::this_thread::get_id() == ids[i]);
      ++counts[i];
    });
  }
  CHECK(counts == std::vector<int>({500, 500, 500}));
}

void TestAnExceptionReachesTheCallerAndThePoolLivesOn() {
  Pool pool(2, {});
  for (std::size_t thrower = 0; thrower < 2; ++thrower) {
    CHECK(MessageOf<std::runtime_error>([&] {
            pool.Run([&](std::size_t i) {
              if (i == thrower) throw std::runtime_error("broken");
            });
          }) == "broken");
  }
  CHECK(MessageOf<std::runtime_error>([&] {
          pool.Run([](std::size_t) { throw std::runtime_error("both"); });
        }) == "both");
  std::atomic<int> count{0};
  pool.Run([&](std::size_t) { ++count; });
  CHECK(count == 2);
}

void TestCallersTakeTurns() {
  Pool pool(2, {});
  int running = 0;  // a race, unless they do
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int run = 0; run < 100; ++run) {
        pool.Run([&](std::size_t i) {
          if (i == 0) ++running;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(running == 300);
}

void TestAClosedPoolRefuses() {
  Pool pool(2, {});
  pool.Close();
  pool.Close();
  CHECK(MessageOf<std::invalid_argument>([&] {
          pool.Run([](std::size_t) {});
        }).find("closed") != std::string::npos);
}

void TestCoresAreBoundOrRefused() {
  cpu_set_t allowed;
  CHECK(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  int core = 0;
  while (!CPU_ISSET(static_cast<std::size_t>(core), &allowed)) ++core;
  Pool pool(1, {core});
  pool.Run([&](std::size_t) {
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof(set), &set) == 0);
    CHECK(CPU_COUNT(&set) == 1);
    CHECK(CPU_ISSET(static_cast<std::size_t>(core), &set));
  });
  CHECK(!MessageOf<std::invalid_argument>([&] { Pool(2, {core}); }).empty());
  CHECK(!MessageOf<std::invalid_argument>([] { Pool(1, {-1}); }).empty());
  CHECK(!MessageOf<std::invalid_argument>([] { Pool(1, {1 << 20}); }).empty());
  // The first thread starts before the second turns out to be impossible.
  CHECK(!MessageOf<std::system_error>([&] {
           Pool(2, {core, CPU_SETSIZE - 1});
         }).empty());
}

void TestAnUpdateEqualsOneStepPerSegment() {
  const KernelTable& kernels = *AvailableKernels().front();
  for (std::size_t num_threads = 1; num_threads <= 3; ++num_threads) {
    Pool pool(num_threads, {});
    std::vector<std::unique_ptr<State>> actual;
    std::vector<std::unique_ptr<State>> expected;
    std::vector<AdamSegment> segments;
    for (std::size_t n : {0, 1, 5000, 70001, 63, 4096}) {
      actual.push_back(std::make_unique<State>(n, 2, 0.1f));
      expected.push_back(std::make_unique<State>(n, 0, 0.1f));
      segments.push_back(
          actual.back()->Segment(GradType::kBfloat16, WeightType::kBfloat16));
      Step(kernels, expected.back()->Segment(GradType::kBfloat16,
                                             WeightType::kBfloat16));
    }
    AdamUpdate(pool, kernels, kParams, segments);
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
    const auto function = adds ? &Accumulate : &Widen;
    function(pool, kernels, segments);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      CHECK(*actual[i] == *expected[i]);
    }
  }
}

}  // namespace
}  // namespace sojax

int main() {
  sojax::TestEveryLengthAndOffsetEqualsTheScalarTwin();
  sojax::TestSumsOfEveryLengthAndOffsetEqualTheScalarTwin();
  sojax::TestTheModeOfTheCallerDoesNotMatterAndIsPutBack();
  sojax::TestAPoolRunsEveryIndexOnItsOwnThread();
  sojax::TestAnExceptionReachesTheCallerAndThePoolLivesOn();
  sojax::TestCallersTakeTurns();
  sojax::TestAClosedPoolRefuses();
  sojax::TestCoresAreBoundOrRefused();
  sojax::TestAnUpdateEqualsOneStepPerSegment();
  sojax::TestSumsEqualOneCallPerSegment();
  return 0;
}
