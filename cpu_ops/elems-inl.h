// How elements are read and written, over a vector trait V.
//
// A trait (vec_<isa>.h) has kLanes, the vector types F of floats, Halves of
// 16-bit words and Doubles, all of kLanes elements, kVectorBits, the size of
// the registers that these are made of, and
//   Set, Add, Mul, Div, Sqrt, Fma(a, b, c) = a * b + c rounded once,
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
// Each kernels_<isa>.cc includes this, compiled with that set's flags. All of
// it has internal linkage, so that no other caller can be given its code.
#ifndef CPU_OPS_ELEMS_INL_H_
#define CPU_OPS_ELEMS_INL_H_

#include <cstdint>

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

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_ELEMS_INL_H_
