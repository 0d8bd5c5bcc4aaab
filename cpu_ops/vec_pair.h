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
  using Ints = Two<typename V::Ints>;
  using Mask = Two<typename V::Mask>;
  static constexpr std::size_t kLanes = 2 * V::kLanes;
  static constexpr unsigned kVectorBits = V::kVectorBits;
  static constexpr bool kStreams = V::kStreams;

  static SOJAX_INLINE F Set(float x) { return {V::Set(x), V::Set(x)}; }
  static SOJAX_INLINE F Add(F a, F b) {
    return {V::Add(a.low, b.low), V::Add(a.high, b.high)};
  }
  static SOJAX_INLINE F Sub(F a, F b) {
    return {V::Sub(a.low, b.low), V::Sub(a.high, b.high)};
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
  static SOJAX_INLINE F Below(F x, F limit) {
    return {V::Below(x.low, limit.low), V::Below(x.high, limit.high)};
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

  static SOJAX_INLINE F QuietNan(F x) {
    return {V::QuietNan(x.low), V::QuietNan(x.high)};
  }
  static SOJAX_INLINE F JoinHalves(Halves high, Halves low) {
    return {V::JoinHalves(high.low, low.low),
            V::JoinHalves(high.high, low.high)};
  }
  static SOJAX_INLINE Halves HighHalves(F x) {
    return {V::HighHalves(x.low), V::HighHalves(x.high)};
  }
  static SOJAX_INLINE Halves LowHalves(F x) {
    return {V::LowHalves(x.low), V::LowHalves(x.high)};
  }

  static SOJAX_INLINE Ints Bits(F x) {
    return {V::Bits(x.low), V::Bits(x.high)};
  }
  static SOJAX_INLINE F FromBits(Ints x) {
    return {V::FromBits(x.low), V::FromBits(x.high)};
  }
  static SOJAX_INLINE Ints AddInts(Ints a, Ints b) {
    return {V::AddInts(a.low, b.low), V::AddInts(a.high, b.high)};
  }
  static SOJAX_INLINE Ints SubInts(Ints a, Ints b) {
    return {V::SubInts(a.low, b.low), V::SubInts(a.high, b.high)};
  }
  static SOJAX_INLINE Mask IsBeyond(Ints x, int limit) {
    return {V::IsBeyond(x.low, limit), V::IsBeyond(x.high, limit)};
  }
  static SOJAX_INLINE Mask IsEqual(Ints x, int value) {
    return {V::IsEqual(x.low, value), V::IsEqual(x.high, value)};
  }
  static SOJAX_INLINE Mask Or(Mask a, Mask b) {
    return {V::Or(a.low, b.low), V::Or(a.high, b.high)};
  }
  static SOJAX_INLINE bool Any(Mask x) { return V::Any(V::Or(x.low, x.high)); }

  static SOJAX_INLINE Ints LoadBytes(const std::int8_t* from) {
    return {V::LoadBytes(from), V::LoadBytes(from + V::kLanes)};
  }
  static SOJAX_INLINE void StoreBytes(std::int8_t* to, Ints a, Ints b) {
    V::StoreBytes(to, a.low, a.high);
    V::StoreBytes(to + kLanes, b.low, b.high);
  }
  template <std::size_t kHalf>
  static SOJAX_INLINE Ints LoadNibbles(const std::uint8_t* from) {
    from += kHalf * V::kLanes;
    return {V::template LoadNibbles<0>(from), V::template LoadNibbles<1>(from)};
  }
  static SOJAX_INLINE void StoreNibbles(std::uint8_t* to, Ints a, Ints b) {
    V::StoreNibbles(to, a.low, a.high);
    V::StoreNibbles(to + V::kLanes, b.low, b.high);
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
