// The body of the AdamW kernel, written once over a vector trait and the types
// of its arrays (elems-inl.h).
#ifndef CPU_OPS_ADAM_INL_H_
#define CPU_OPS_ADAM_INL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "accumulate.h"
#include "adam.h"
#include "elems-inl.h"
#include "formulas-inl.h"
#include "fp_mode.h"
#include "prefetch-inl.h"
#include "squares-inl.h"

namespace sojax {
namespace {

// Weights are streamed: nobody reads them soon, and an ordinary store would
// first fetch the line that it overwrites (5 % of the time on two Zen 5
// cores). p, mu and nu are not: their lines have just been read.
template <class V, class Weight>
constexpr bool kStreamsWeights = Weight::kWrites && V::kStreams;

// Elements from `weight` to the next address where a vector can be streamed;
// SIZE_MAX if there is none. Below V::kLanes otherwise.
template <class V, class Weight>
SOJAX_INLINE std::size_t ElemsToAlignment(const void* weight) {
  constexpr std::size_t kElemBytes = sizeof(typename Weight::Elem);
  const auto address = reinterpret_cast<std::uintptr_t>(weight);
  if (address % kElemBytes != 0) return SIZE_MAX;
  return (0 - address) % (V::kLanes * kElemBytes) / kElemBytes;
}

// Writes the weights from element i on; kStream: past the caches.
template <class V, class Weight, bool kStream, class... Count>
SOJAX_INLINE void StoreWeight(const AdamBuffers& b, std::size_t i,
                              typename V::F p, Count... count) {
  if constexpr (Weight::kWrites) {
    auto* weight = static_cast<typename Weight::Elem*>(b.weight) + i;
    if constexpr (kStream) {
      Weight::template Stream<V>(weight, p);
    } else {
      Weight::template Store<V>(weight, p, count...);
    }
  }
}

template <class V, class Grad, class Master, class Weight>
class AdamStep {
 public:
  // An AdamStepFn.
  static void Run(const AdamParams& params, const AdamBuffers& buffers,
                  std::size_t n) {
    const ScopedDefaultFpMode fp_mode;
    if (buffers.sumsq != nullptr) {
      UpdateWithSquares(params, buffers, n);
    } else {
      Update(params, buffers, n);
    }
  }

 private:
  using F = typename V::F;

  // Neither is inlined: see ScopedDefaultFpMode.
  static __attribute__((noinline)) void Update(const AdamParams& params,
                                               const AdamBuffers& buffers,
                                               std::size_t n) {
    const Formulas<V> formulas(params);
    const AdamBuffers b = buffers;  // a copy stays in registers
    NoSquares none;
    if constexpr (kStreamsWeights<V, Weight>) {
      const std::size_t head = ElemsToAlignment<V, Weight>(b.weight);
      if (head < n) {
        if (head != 0) UpdateVector<false>(formulas, b, none, 0, 0, head);
        UpdateRange<true>(formulas, b, none, head, n);
        V::Fence();
        return;
      }
    }
    UpdateRange<false>(formulas, b, none, 0, n);
  }

  // Here vectors start at multiples of their length from the start of a chunk.
  static __attribute__((noinline)) void UpdateWithSquares(
      const AdamParams& params, const AdamBuffers& buffers, std::size_t n) {
    const Formulas<V> formulas(params);
    const AdamBuffers b = buffers;
    for (std::size_t chunk = 0; chunk < NumChunks(n); ++chunk) {
      const std::size_t begin = chunk * kChunkElems;
      const std::size_t end = std::min(n - begin, kChunkElems) + begin;
      ChunkSquares<V> squares;
      UpdateChunk(formulas, b, squares, begin, end);
      squares.Store(b.sumsq + chunk);
    }
    if constexpr (V::kStreams) V::Fence();
  }

  static SOJAX_INLINE void UpdateChunk(const Formulas<V>& formulas,
                                       const AdamBuffers& b,
                                       ChunkSquares<V>& squares,
                                       std::size_t begin, std::size_t end) {
    if constexpr (kStreamsWeights<V, Weight>) {
      if (ElemsToAlignment<V, Weight>(b.weight) == 0) {
        UpdateRange<true>(formulas, b, squares, begin, end);
        return;
      }
    }
    UpdateRange<false>(formulas, b, squares, begin, end);
  }

  // Updates the elements i..end-1; kStream: the weights pass the caches.
  template <bool kStream, class Squares>
  static SOJAX_INLINE void UpdateRange(const Formulas<V>& formulas,
                                       const AdamBuffers& b, Squares& squares,
                                       std::size_t i, std::size_t end) {
    for (; i + kBlockElems <= end; i += kBlockElems) {
      PrefetchStep<Grad, Master>(b, i);
      for (std::size_t j = 0; j < kBlockElems / V::kLanes; ++j) {
        UpdateVector<kStream>(formulas, b, squares, j, i + j * V::kLanes);
      }
    }
    std::size_t j = 0;
    for (; i + V::kLanes <= end; i += V::kLanes) {
      UpdateVector<kStream>(formulas, b, squares, j++, i);
    }
    if (i < end) UpdateVector<false>(formulas, b, squares, j, i, end - i);
  }

  // Updates V::kLanes elements from i on, or `count` of them. j counts vectors.
  template <bool kStream, class Squares, class... Count>
  static SOJAX_INLINE void UpdateVector(const Formulas<V>& formulas,
                                        const AdamBuffers& b, Squares& squares,
                                        std::size_t j, std::size_t i,
                                        Count... count) {
    const F grad = LoadGrad<V, Grad>(b.sum, b.grad, i, count...);
    squares.Add(j, grad);
    const F g = formulas.ScaledGrad(grad);
    const F mu =
        formulas.NewMu(V::Load(b.mu + i, count...), formulas.MuGain(g));
    const F nu =
        formulas.NewNu(V::Load(b.nu + i, count...), formulas.NuGain(g));
    const F p = formulas.NewP(Master::template Load<V>(b, i, count...),
                              formulas.Move(mu, nu));
    V::Store(b.mu + i, mu, count...);
    V::Store(b.nu + i, nu, count...);
    Master::template Store<V>(b, i, p, count...);
    StoreWeight<V, Weight, kStream>(b, i, p, count...);
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_ADAM_INL_H_
