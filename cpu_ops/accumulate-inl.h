// The body of the kernels that add gradients up, written once over a vector
// trait and the type of the gradients (elems-inl.h).
#ifndef CPU_OPS_ACCUMULATE_INL_H_
#define CPU_OPS_ACCUMULATE_INL_H_

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "accumulate.h"
#include "elems-inl.h"
#include "fp_mode.h"

namespace sojax {
namespace {

// kAdds: to what is there; else it is overwritten.
template <class V, class Grad, bool kAdds>
class Accumulation {
 public:
  // An AccumulateFn.
  static void Run(const AccumulateBuffers& buffers, std::size_t n) {
    const ScopedDefaultFpMode fp_mode;
    if (buffers.sumsq != nullptr) {
      AddWithSquares(buffers, n);
    } else {
      Add(buffers, n);
    }
  }

 private:
  using F = typename V::F;
  using Doubles = typename V::Doubles;
  static constexpr std::size_t kNumVectors = kSumLanes / V::kLanes;
  static_assert(kSumLanes % V::kLanes == 0);

  // Neither is inlined: see ScopedDefaultFpMode.
  static __attribute__((noinline)) void Add(const AccumulateBuffers& b,
                                            std::size_t n) {
    ForEachVector(b, 0, n, [](std::size_t, F) {});
  }

  static __attribute__((noinline)) void AddWithSquares(
      const AccumulateBuffers& b, std::size_t n) {
    for (std::size_t chunk = 0; chunk < NumChunks(n); ++chunk) {
      const std::size_t begin = chunk * kChunkElems;
      const std::size_t end = std::min(n - begin, kChunkElems) + begin;
      Doubles sums[kNumVectors];
      for (Doubles& x : sums) x = V::Zeros();
      ForEachVector(b, begin, end, [&](std::size_t j, F x) {
        sums[j] = V::AddSquares(sums[j], x);
      });
      const double sumsq = Total(sums);
      std::memcpy(b.sumsq + chunk, &sumsq, sizeof(sumsq));
    }
  }

  // Adds the elements begin..end-1 and hands the new sums to use(j, x), where
  // x has the elements begin + j * V::kLanes and up, modulo kSumLanes. Lanes
  // of x past the end are 0.
  template <class Use>
  static SOJAX_INLINE void ForEachVector(const AccumulateBuffers& b,
                                         std::size_t begin, std::size_t end,
                                         const Use& use) {
    std::size_t i = begin;
    for (; i + kSumLanes <= end; i += kSumLanes) {
      for (std::size_t j = 0; j < kNumVectors; ++j) {
        use(j, AddVector(b, i + j * V::kLanes));
      }
    }
    std::size_t j = 0;
    for (; i + V::kLanes <= end; i += V::kLanes) use(j++, AddVector(b, i));
    if (i < end) use(j, AddVector(b, i, end - i));
  }

  // Adds V::kLanes elements from i on, or `count` of them.
  template <class... Count>
  static SOJAX_INLINE F AddVector(const AccumulateBuffers& b, std::size_t i,
                                  Count... count) {
    const auto* grad = static_cast<const typename Grad::Elem*>(b.grad) + i;
    F sum = Grad::template Load<V>(grad, count...);
    if constexpr (kAdds) sum = V::Add(V::Load(b.sum + i, count...), sum);
    V::Store(b.sum + i, sum, count...);
    return sum;
  }

  static SOJAX_INLINE double Total(const Doubles (&sums)[kNumVectors]) {
    alignas(64) double lanes[kSumLanes];
    for (std::size_t j = 0; j < kNumVectors; ++j) {
      V::StoreDoubles(lanes + j * V::kLanes, sums[j]);
    }
    for (std::size_t half = kSumLanes / 2; half != 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_ACCUMULATE_INL_H_
