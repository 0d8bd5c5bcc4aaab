// Two vectors side by side as one, so that several independent ones are in
// flight: a chain of operations waits for itself, two such chains overlap.
#ifndef CPU_OPS_VEC_PAIR_H_
#define CPU_OPS_VEC_PAIR_H_

#include <cstddef>
#include <cstdint>

#include "inline.h"

namespace sojax {
namespace {

// The trait of twice the lanes of V, all of whose functions it calls twice.
template <class V>
struct Pair {
  template <class T>
  struct Two {
    T low, high;
  };
  using F = Two<typename V::F>;
  using Halves = Two<typename V::Halves>;
  using Doubles = Two<typename V::Doubles>;
  static constexpr std::size_t kLanes = 2 * V::kLanes;
  static constexpr unsigned kVectorBits = V::kVectorBits;
  static constexpr bool kStreams = V::kStreams;

  static SOJAX_INLINE F Set(float x) { return {V::Set(x), V::Set(x)}; }
  static SOJAX_INLINE F Add(F a, F b) {
    return {V::Add(a.low, b.low), V::Add(a.high, b.high)};
  }
  static SOJAX_INLINE F Mul(F a, F b) {
    return {V::Mul(a.low, b.low), V::Mul(a.high, b.high)};
  }
  static SOJAX_INLINE F Div(F a, F b) {
    return {V::Div(a.low, b.low), V::Div(a.high, b.high)};
  }
  static SOJAX_INLINE F Sqrt(F a) { return {V::Sqrt(a.low), V::Sqrt(a.high)}; }
  static SOJAX_INLINE F Fma(F a, F b, F c) {
    return {V::Fma(a.low, b.low, c.low), V::Fma(a.high, b.high, c.high)};
  }

  static SOJAX_INLINE F Load(const float* from) {
    return {V::Load(from), V::Load(from + V::kLanes)};
  }
  static SOJAX_INLINE void Store(float* to, F x) {
    V::Store(to, x.low);
    V::Store(to + V::kLanes, x.high);
  }
  static SOJAX_INLINE Halves LoadHalves(const std::uint16_t* from) {
    return {V::LoadHalves(from), V::LoadHalves(from + V::kLanes)};
  }
  static SOJAX_INLINE void StoreHalves(std::uint16_t* to, Halves x) {
    V::StoreHalves(to, x.low);
    V::StoreHalves(to + V::kLanes, x.high);
  }

  static SOJAX_INLINE F Load(const float* from, std::size_t count) {
    if (count <= V::kLanes) return {V::Load(from, count), V::Set(0)};
    return {V::Load(from), V::Load(from + V::kLanes, count - V::kLanes)};
  }
  static SOJAX_INLINE void Store(float* to, F x, std::size_t count) {
    if (count <= V::kLanes) return V::Store(to, x.low, count);
    V::Store(to, x.low);
    V::Store(to + V::kLanes, x.high, count - V::kLanes);
  }
  static SOJAX_INLINE Halves LoadHalves(const std::uint16_t* from,
                                        std::size_t count) {
    if (count <= V::kLanes) {
      return {V::LoadHalves(from, count), V::LoadHalves(from, 0)};
    }
    return {V::LoadHalves(from),
            V::LoadHalves(from + V::kLanes, count - V::kLanes)};
  }
  static SOJAX_INLINE void StoreHalves(std::uint16_t* to, Halves x,
                                       std::size_t count) {
    if (count <= V::kLanes) return V::StoreHalves(to, x.low, count);
    V::StoreHalves(to, x.low);
    V::StoreHalves(to + V::kLanes, x.high, count - V::kLanes);
  }

  static SOJAX_INLINE F WidenBf16(Halves x) {
    return {V::WidenBf16(x.low), V::WidenBf16(x.high)};
  }
  static SOJAX_INLINE Halves NarrowBf16(F x) {
    return {V::NarrowBf16(x.low), V::NarrowBf16(x.high)};
  }
  static SOJAX_INLINE F WidenF16(Halves x) {
    return {V::WidenF16(x.low), V::WidenF16(x.high)};
  }
  static SOJAX_INLINE Halves NarrowF16(F x) {
    return {V::NarrowF16(x.low), V::NarrowF16(x.high)};
  }

  static SOJAX_INLINE Doubles Zeros() { return {V::Zeros(), V::Zeros()}; }
  static SOJAX_INLINE Doubles AddSquares(Doubles sums, F x) {
    return {V::AddSquares(sums.low, x.low), V::AddSquares(sums.high, x.high)};
  }
  static SOJAX_INLINE void StoreDoubles(double* to, Doubles x) {
    V::StoreDoubles(to, x.low);
    V::StoreDoubles(to + V::kLanes, x.high);
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_VEC_PAIR_H_
