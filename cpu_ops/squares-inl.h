// The sum of squares of one chunk, in the order that accumulate.h gives.
#ifndef CPU_OPS_SQUARES_INL_H_
#define CPU_OPS_SQUARES_INL_H_

#include <cstddef>
#include <cstring>

#include "accumulate.h"
#include "elems-inl.h"

namespace sojax {
namespace {

template <class V>
class ChunkSquares {
 public:
  // Vectors of one turn through the lanes.
  static constexpr std::size_t kNumVectors = kSumLanes / V::kLanes;
  static_assert(kSumLanes % V::kLanes == 0);

  SOJAX_INLINE ChunkSquares() {
    for (auto& sums : sums_) sums = V::Zeros();
  }

  // Adds the squares of the vector that starts at element j * V::kLanes of the
  // chunk, modulo kSumLanes.
  SOJAX_INLINE void Add(std::size_t j, typename V::F x) {
    sums_[j % kNumVectors] = V::AddSquares(sums_[j % kNumVectors], x);
  }

  // Writes the total to any address.
  SOJAX_INLINE void Store(double* sumsq) const {
    alignas(64) double lanes[kSumLanes];
    for (std::size_t j = 0; j < kNumVectors; ++j) {
      V::StoreDoubles(lanes + j * V::kLanes, sums_[j]);
    }
    for (std::size_t half = kSumLanes / 2; half != 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    std::memcpy(sumsq, lanes, sizeof(*lanes));
  }

 private:
  typename V::Doubles sums_[kNumVectors];
};

// Takes the place of ChunkSquares where none are asked for.
struct NoSquares {
  template <class F>
  SOJAX_INLINE void Add(std::size_t, F) {}
  SOJAX_INLINE void Store(double*) const {}
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_SQUARES_INL_H_
