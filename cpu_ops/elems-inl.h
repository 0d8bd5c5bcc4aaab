// How elements are read and written, over a vector trait V.
//
// A trait (vec_<isa>.h) has kLanes, which divides kSumLanes, the vector types F
// of floats, Halves of 16-bit words, Ints of 32-bit integers and Doubles, all
// of kLanes elements, Mask of as many truth values, kVectorBits, the size of
// the registers that these are made of, and
//   Set, Add, Sub, Mul, Div, Sqrt, Fma(a, b, c) = a * b + c rounded once,
//   Below(x, limit) = x < limit ? x : limit, so limit for NaN,
//   Load(const float*), Store(float*, F), LoadHalves(const uint16_t*) and
//   StoreHalves(uint16_t*, Halves), each also with a count of lanes: those
//   below the count are read (the others are 0) or written, memory past it is
//   not touched,
//   WidenBf16 and WidenF16, exact,
//   NarrowBf16: nearest, ties away from zero, every NaN becomes 0x7fc0,
//   NarrowF16: nearest even, past the largest infinity, every NaN becomes
//   0x7e00,
//   Zeros(), AddSquares(Doubles sums, F x) = sums + x * x and
//   StoreDoubles(double*, Doubles), to an aligned address,
//   kStreams; if true, Stream and StreamHalves, stores past the caches to an
//   address aligned to the bytes stored, and Fence, which orders them.
//
// For split masters, on the bits of floats, the sum modulo 2^32:
//   JoinHalves(high, low) = (high << 16) + low, low with its sign,
//   HighHalves(F) = (bits + 0x8000) >> 16, LowHalves(F), the low 16 bits,
//   QuietNan(F): 0x7fc00000 for every NaN.
//
// For records:
//   Bits(F) and FromBits(Ints), AddInts and SubInts, modulo 2^32,
//   IsBeyond(Ints x, int limit): x < -limit or x > limit, IsEqual(Ints, int),
//   Or(Mask, Mask), Any(Mask),
//   StoreBytes(int8_t*, Ints a, Ints b): 2 * kLanes bytes, LoadBytes(from):
//   kLanes bytes,
//   StoreNibbles(uint8_t*, Ints a, Ints b): as many codes of 4 bits, even ones
//   in the low bits, LoadNibbles<kHalf>(from): the codes of a (0) or b (1),
//   if kStreams, StreamBytes and StreamNibbles.
//
// Each kernels_<isa>.cc includes this, compiled with that set's flags. All of
// it has internal linkage, so that no other caller can be given its code.
#ifndef CPU_OPS_ELEMS_INL_H_
#define CPU_OPS_ELEMS_INL_H_

#include <cstddef>
#include <cstdint>

#include "adam.h"
#include "elem_types.h"
#include "inline.h"

namespace sojax {
namespace {

// Where gradients come from.
struct GradFloat32 {
  using Elem = float;
  template <class V, class... Count>
  static SOJAX_INLINE typename V::F Load(const Elem* from, Count... count) {
    return V::Load(from, count...);
  }
};

struct GradBfloat16 {
  using Elem = std::uint16_t;
  template <class V, class... Count>
  static SOJAX_INLINE typename V::F Load(const Elem* from, Count... count) {
    return V::WidenBf16(V::LoadHalves(from, count...));
  }
};

struct GradFloat16 {
  using Elem = std::uint16_t;
  template <class V, class... Count>
  static SOJAX_INLINE typename V::F Load(const Elem* from, Count... count) {
    return V::WidenF16(V::LoadHalves(from, count...));
  }
};

// Where working weights go.
struct WeightNone {
  using Elem = char;
  static constexpr bool kWrites = false;
  template <class V, class... Count>
  static SOJAX_INLINE void Store(Elem*, typename V::F, Count...) {}
};

struct WeightFloat32 {
  using Elem = float;
  static constexpr bool kWrites = true;
  template <class V, class... Count>
  static SOJAX_INLINE void Store(Elem* to, typename V::F p, Count... count) {
    V::Store(to, p, count...);
  }
  template <class V>
  static SOJAX_INLINE void Stream(Elem* to, typename V::F p) {
    V::Stream(to, p);
  }
};

struct WeightBfloat16 {
  using Elem = std::uint16_t;
  static constexpr bool kWrites = true;
  template <class V, class... Count>
  static SOJAX_INLINE void Store(Elem* to, typename V::F p, Count... count) {
    V::StoreHalves(to, V::NarrowBf16(p), count...);
  }
  template <class V>
  static SOJAX_INLINE void Stream(Elem* to, typename V::F p) {
    V::StreamHalves(to, V::NarrowBf16(p));
  }
};

struct WeightFloat16 {
  using Elem = std::uint16_t;
  static constexpr bool kWrites = true;
  template <class V, class... Count>
  static SOJAX_INLINE void Store(Elem* to, typename V::F p, Count... count) {
    V::StoreHalves(to, V::NarrowF16(p), count...);
  }
  template <class V>
  static SOJAX_INLINE void Stream(Elem* to, typename V::F p) {
    V::StreamHalves(to, V::NarrowF16(p));
  }
};

// Where master weights are. Load and Store take what follows a step, Restore
// keeps every bit.
struct MasterFloat32 {
  static constexpr std::size_t kElemBytes = 4;  // of each array
  template <class V, class... Count>
  static SOJAX_INLINE typename V::F Load(const AdamBuffers& b, std::size_t i,
                                         Count... count) {
    return V::Load(static_cast<const float*>(b.p) + i, count...);
  }
  template <class V, class... Count>
  static SOJAX_INLINE void Store(const AdamBuffers& b, std::size_t i,
                                 typename V::F p, Count... count) {
    V::Store(static_cast<float*>(b.p) + i, p, count...);
  }
  template <class V>
  static SOJAX_INLINE void Restore(const AdamBuffers& b, std::size_t i,
                                   typename V::F p) {
    Store<V>(b, i, p);
  }
};

struct MasterSplit {
  static constexpr std::size_t kElemBytes = 2;
  template <class V, class... Count>
  static SOJAX_INLINE typename V::F Load(const AdamBuffers& b, std::size_t i,
                                         Count... count) {
    return V::JoinHalves(V::LoadHalves(High(b) + i, count...),
                         V::LoadHalves(Low(b) + i, count...));
  }
  // The high half is a working weight, and NaN has to stay NaN in it.
  template <class V, class... Count>
  static SOJAX_INLINE void Store(const AdamBuffers& b, std::size_t i,
                                 typename V::F p, Count... count) {
    StoreBits<V>(b, i, V::QuietNan(p), count...);
  }
  template <class V>
  static SOJAX_INLINE void Restore(const AdamBuffers& b, std::size_t i,
                                   typename V::F p) {
    StoreBits<V>(b, i, p);
  }

 private:
  static SOJAX_INLINE std::uint16_t* High(const AdamBuffers& b) {
    return static_cast<std::uint16_t*>(b.p);
  }
  static SOJAX_INLINE std::uint16_t* Low(const AdamBuffers& b) {
    return reinterpret_cast<std::uint16_t*>(b.p_low);
  }
  template <class V, class... Count>
  static SOJAX_INLINE void StoreBits(const AdamBuffers& b, std::size_t i,
                                     typename V::F p, Count... count) {
    V::StoreHalves(High(b) + i, V::HighHalves(p), count...);
    V::StoreHalves(Low(b) + i, V::LowHalves(p), count...);
  }
};

// The types that stand for those of elem_types.h.
template <GradType kType>
struct GradOf;
template <>
struct GradOf<GradType::kFloat32> {
  using Type = GradFloat32;
};
template <>
struct GradOf<GradType::kBfloat16> {
  using Type = GradBfloat16;
};
template <>
struct GradOf<GradType::kFloat16> {
  using Type = GradFloat16;
};

template <WeightType kType>
struct WeightOf;
template <>
struct WeightOf<WeightType::kNone> {
  using Type = WeightNone;
};
template <>
struct WeightOf<WeightType::kFloat32> {
  using Type = WeightFloat32;
};
template <>
struct WeightOf<WeightType::kBfloat16> {
  using Type = WeightBfloat16;
};
template <>
struct WeightOf<WeightType::kFloat16> {
  using Type = WeightFloat16;
};

template <MasterType kType>
struct MasterOf;
template <>
struct MasterOf<MasterType::kFloat32> {
  using Type = MasterFloat32;
};
template <>
struct MasterOf<MasterType::kSplit> {
  using Type = MasterSplit;
};

// The gradients from element i on, added to what is there to add them to.
template <class V, class Grad, class... Count>
SOJAX_INLINE typename V::F LoadGrad(const float* sum, const void* grad,
                                    std::size_t i, Count... count) {
  const auto* from = static_cast<const typename Grad::Elem*>(grad) + i;
  const typename V::F x = Grad::template Load<V>(from, count...);
  if (sum == nullptr) return x;
  return V::Add(V::Load(sum + i, count...), x);
}

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_ELEMS_INL_H_
