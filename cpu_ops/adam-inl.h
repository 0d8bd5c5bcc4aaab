// The body of the AdamW kernel, written once over a vector trait and the types
// of its arrays (elems-inl.h).
#ifndef CPU_OPS_ADAM_INL_H_
#define CPU_OPS_ADAM_INL_H_

#include <cstddef>
#include <cstdint>

#include "adam.h"
#include "elems-inl.h"
#include "fp_mode.h"

namespace sojax {
namespace {

// Elements between two rounds of prefetches: one cache line of bfloat16, two
// of float.
constexpr std::size_t kBlockElems = 32;

// How far ahead of the loads to prefetch, into the second-level cache. Chosen
// on two other AVX-512 cores. On two Zen 5 cores of a busy machine, with 32M
// parameters, 4 KiB took 1.05 of its time on one core; no prefetch took 0.91 to
// 1.02 and 1 KiB 0.87 to 1.30, too noisy to choose by. There, loops of the same
// loads and stores with next to no arithmetic took 0.89 to 1.05 of it.
constexpr std::size_t kPrefetchBytes = 2048;

constexpr std::size_t kCacheLineBytes = 64;

template <class V, class Grad, class Weight>
class AdamStep {
 public:
  // An AdamStepFn.
  static void Run(const AdamParams& params, const AdamBuffers& buffers,
                  std::size_t n) {
    const ScopedDefaultFpMode fp_mode;
    Update(params, buffers, n);
  }

 private:
  using F = typename V::F;
  using GradElem = typename Grad::Elem;
  using WeightElem = typename Weight::Elem;

  // The parameters in every lane.
  struct Lanes {
    F b1, b2, one_minus_b1, one_minus_b2, k, r, s, d, eps, grad_scale;
  };

  static SOJAX_INLINE Lanes Broadcast(const AdamParams& x) {
    return {V::Set(x.b1),
            V::Set(x.b2),
            V::Set(x.one_minus_b1),
            V::Set(x.one_minus_b2),
            V::Set(x.k),
            V::Set(x.r),
            V::Set(x.s),
            V::Set(x.d),
            V::Set(x.eps),
            V::Set(x.grad_scale)};
  }

  // Not inlined: see ScopedDefaultFpMode.
  static __attribute__((noinline)) void Update(const AdamParams& params,
                                               const AdamBuffers& b,
                                               std::size_t n) {
    const Lanes c = Broadcast(params);
    if constexpr (Weight::kWrites && V::kStreams) {
      const std::size_t head = ElemsToAlignment(b.weight);
      if (head < n) {
        if (head != 0) UpdateVector<false>(c, b, 0, head);
        UpdateFrom<true>(c, b, head, n);
        V::Fence();
        return;
      }
    }
    UpdateFrom<false>(c, b, 0, n);
  }

  // Weights are streamed: nobody reads them soon, and an ordinary store would
  // first fetch the line that it overwrites (5 % of the time on two Zen 5
  // cores). p, mu and nu are not: their lines have just been read.
  //
  // Elements from `weight` to the next address where a vector can be
  // streamed; SIZE_MAX if there is none. Below V::kLanes otherwise.
  static SOJAX_INLINE std::size_t ElemsToAlignment(const void* weight) {
    constexpr std::size_t kVectorBytes = V::kLanes * sizeof(WeightElem);
    const auto address = reinterpret_cast<std::uintptr_t>(weight);
    if (address % sizeof(WeightElem) != 0) return SIZE_MAX;
    return (0 - address) % kVectorBytes / sizeof(WeightElem);
  }

  // Updates the elements i..n-1; kStream: the weights pass the caches.
  template <bool kStream>
  static SOJAX_INLINE void UpdateFrom(const Lanes& c, const AdamBuffers& b,
                                      std::size_t i, std::size_t n) {
    for (; i + kBlockElems <= n; i += kBlockElems) {
      PrefetchBlock(b, i);
      for (std::size_t j = 0; j < kBlockElems; j += V::kLanes) {
        UpdateVector<kStream>(c, b, i + j);
      }
    }
    for (; i + V::kLanes <= n; i += V::kLanes) {
      UpdateVector<kStream>(c, b, i);
    }
    if (i < n) UpdateVector<false>(c, b, i, n - i);
  }

  static SOJAX_INLINE void PrefetchBlock(const AdamBuffers& b, std::size_t i) {
    Prefetch<sizeof(float)>(b.p, i);
    Prefetch<sizeof(float)>(b.mu, i);
    Prefetch<sizeof(float)>(b.nu, i);
    Prefetch<sizeof(GradElem)>(b.grad, i);
  }

  // Prefetches the block kPrefetchBytes past element i. Past the end of the
  // array this does nothing, but a pointer there may not be formed.
  template <std::size_t kElemBytes>
  static SOJAX_INLINE void Prefetch(const void* base, std::size_t i) {
    const std::uintptr_t first =
        reinterpret_cast<std::uintptr_t>(base) + i * kElemBytes;
    for (std::size_t offset = 0; offset < kBlockElems * kElemBytes;
         offset += kCacheLineBytes) {
      __builtin_prefetch(
          reinterpret_cast<const void*>(first + kPrefetchBytes + offset), 0, 2);
    }
  }

  // Updates V::kLanes elements from i on, or `count` of them.
  template <bool kStream, class... Count>
  static SOJAX_INLINE void UpdateVector(const Lanes& c, const AdamBuffers& b,
                                        std::size_t i, Count... count) {
    const auto* grad = static_cast<const GradElem*>(b.grad) + i;
    const F g = V::Mul(Grad::template Load<V>(grad, count...), c.grad_scale);
    const F gm = V::Mul(c.one_minus_b1, g);
    const F mu = V::Fma(V::Load(b.mu + i, count...), c.b1, gm);
    const F gv = V::Mul(c.one_minus_b2, V::Mul(g, g));
    const F nu = V::Fma(V::Load(b.nu + i, count...), c.b2, gv);
    const F root = V::Sqrt(V::Add(nu, c.r));
    const F u = V::Mul(V::Div(mu, V::Fma(root, c.k, c.eps)), c.s);
    const F p_old = V::Load(b.p + i, count...);
    const F p = V::Add(p_old, V::Fma(p_old, c.d, u));
    V::Store(b.mu + i, mu, count...);
    V::Store(b.nu + i, nu, count...);
    V::Store(b.p + i, p, count...);
    if constexpr (Weight::kWrites) {
      auto* weight = static_cast<WeightElem*>(b.weight) + i;
      if constexpr (kStream) {
        Weight::template Stream<V>(weight, p);
      } else {
        Weight::template Store<V>(weight, p, count...);
      }
    }
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_ADAM_INL_H_
