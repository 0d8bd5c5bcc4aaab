// The bodies of the kernels that add gradients up or their squares, and of the
// one that rounds weights, written once over a vector trait and the types of
// the arrays (elems-inl.h).
#ifndef CPU_OPS_ACCUMULATE_INL_H_
#define CPU_OPS_ACCUMULATE_INL_H_

#include <algorithm>
#include <cstddef>

#include "accumulate.h"
#include "elems-inl.h"
#include "fp_mode.h"
#include "prefetch-inl.h"
#include "squares-inl.h"

namespace sojax {
namespace {

// Calls use(i, j), or use(i, j, count) at the end, for vectors of the elements
// begin..end-1: i is the first element, j counts vectors modulo kSumLanes.
template <class V, class Use>
SOJAX_INLINE void ForEachVector(std::size_t begin, std::size_t end,
                                const Use& use) {
  constexpr std::size_t kNumVectors = ChunkSquares<V>::kNumVectors;
  std::size_t i = begin;
  for (; i + kSumLanes <= end; i += kSumLanes) {
    for (std::size_t j = 0; j < kNumVectors; ++j) use(i + j * V::kLanes, j);
  }
  std::size_t j = 0;
  for (; i + V::kLanes <= end; i += V::kLanes) use(i, j++);
  if (i < end) use(i, j, end - i);
}

// Calls add(begin, end, squares) for each chunk of n elements and writes its
// squares to sumsq.
template <class V, class AddChunk>
SOJAX_INLINE void ForEachChunk(std::size_t n, double* sumsq,
                               const AddChunk& add) {
  for (std::size_t chunk = 0; chunk < NumChunks(n); ++chunk) {
    const std::size_t begin = chunk * kChunkElems;
    ChunkSquares<V> squares;
    add(begin, std::min(n - begin, kChunkElems) + begin, squares);
    squares.Store(sumsq + chunk);
  }
}

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
  // Neither is inlined: see ScopedDefaultFpMode.
  static __attribute__((noinline)) void Add(const AccumulateBuffers& b,
                                            std::size_t n) {
    NoSquares none;
    AddRange(b, 0, n, none);
  }

  static __attribute__((noinline)) void AddWithSquares(
      const AccumulateBuffers& b, std::size_t n) {
    ForEachChunk<V>(n, b.sumsq, [&](auto begin, auto end, auto& squares) {
      AddRange(b, begin, end, squares);
    });
  }

  template <class Squares>
  static SOJAX_INLINE void AddRange(const AccumulateBuffers& b,
                                    std::size_t begin, std::size_t end,
                                    Squares& squares) {
    ForEachVector<V>(begin, end, [&](auto i, auto j, auto... count) {
      const float* sum = kAdds ? b.sum : nullptr;
      const auto x = LoadGrad<V, Grad>(sum, b.grad, i, count...);
      V::Store(b.sum + i, x, count...);
      squares.Add(j, x);
    });
  }
};

template <class V, class Grad>
class Squares {
 public:
  // A SquaresFn.
  static void Run(const SquaresBuffers& buffers, std::size_t n) {
    const ScopedDefaultFpMode fp_mode;
    Add(buffers, n);
  }

 private:
  // Not inlined: see ScopedDefaultFpMode.
  static __attribute__((noinline)) void Add(const SquaresBuffers& b,
                                            std::size_t n) {
    ForEachChunk<V>(n, b.sumsq, [&](auto begin, auto end, auto& squares) {
      ForEachVector<V>(begin, end, [&](auto i, auto j, auto... count) {
        squares.Add(j, LoadGrad<V, Grad>(b.sum, b.grad, i, count...));
      });
    });
  }
};

template <class V, class Weight>
class Narrowing {
 public:
  // A NarrowFn.
  static void Run(const float* p, void* weight, std::size_t n) {
    const ScopedDefaultFpMode fp_mode;
    Narrow(p, static_cast<typename Weight::Elem*>(weight), n);
  }

 private:
  // Not inlined: see ScopedDefaultFpMode.
  static __attribute__((noinline)) void Narrow(const float* p,
                                               typename Weight::Elem* weight,
                                               std::size_t n) {
    ForEachVector<V>(0, n, [&](auto i, auto, auto... count) {
      Weight::template Store<V>(weight + i, V::Load(p + i, count...), count...);
    });
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_ACCUMULATE_INL_H_
