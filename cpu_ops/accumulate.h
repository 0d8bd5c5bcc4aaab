// Sums of gradients on the CPU, and the sums of their squares.
#ifndef CPU_OPS_ACCUMULATE_H_
#define CPU_OPS_ACCUMULATE_H_

#include <cstddef>

namespace sojax {

// Elements that share one sum of squares.
inline constexpr std::size_t kChunkElems = 4096;

// Lanes that the squares of a chunk are first added up in.
inline constexpr std::size_t kSumLanes = 16;
static_assert(kChunkElems % kSumLanes == 0);

// Returns the number of chunks of n elements, the last of which may be short.
constexpr std::size_t NumChunks(std::size_t n) {
  return n / kChunkElems + (n % kChunkElems != 0);
}

// One flat run of gradients. The arrays must not overlap, and may start at any
// byte address.
struct AccumulateBuffers {
  float* sum;
  const void* grad;  // elements of the instance's GradType
  double* sumsq;     // nullptr, or written: NumChunks(n) elements
};

// Sets sum = grad (widen) or sum = sum + grad (accumulate) for n elements,
// gradients widened exactly, sums rounded to float and denormals kept.
//
// If sumsq is given, each of its elements becomes the sum of squares of the
// new sums of one chunk. A square is exact in double; the square of element i
// of the chunk is added to lane i % kSumLanes, elements in order; then lanes
// are added in halves: 8..15 to 0..7, 4..7 to 0..3, and so on. No sum of
// squares overflows: it is finite exactly if all elements of its chunk are.
//
// The bits depend on nothing but the inputs: not on the instruction set or on
// alignment (NaN payloads excepted). The floating-point environment of the
// calling thread is left as it was found.
using AccumulateFn = void (*)(const AccumulateBuffers& buffers, std::size_t n);

// The same for gradients that are only read.
struct SquaresBuffers {
  const float* sum;  // nullptr, or what the gradients are added to
  const void* grad;  // elements of the instance's GradType
  double* sumsq;     // written: NumChunks(n) elements
};

// Sets sumsq to the sums of squares of sum + grad, as an AccumulateFn does.
using SquaresFn = void (*)(const SquaresBuffers& buffers, std::size_t n);

// Writes n working weights, rounded as a step does, from float masters. The
// arrays must not overlap, and may start at any byte address.
using NarrowFn = void (*)(const float* p, void* weight, std::size_t n);

}  // namespace sojax

#endif  // CPU_OPS_ACCUMULATE_H_
