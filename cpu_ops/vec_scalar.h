// One float at a time, in standard C++: the twin that the others must equal,
// and what runs where there is no vector instance.
#ifndef CPU_OPS_VEC_SCALAR_H_
#define CPU_OPS_VEC_SCALAR_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sojax {
namespace {

struct Scalar {
  using F = float;
  static constexpr std::size_t kLanes = 1;
  static constexpr bool kStreams = false;

  static F Set(float x) { return x; }
  static F Add(F a, F b) { return a + b; }
  static F Mul(F a, F b) { return a * b; }
  static F Div(F a, F b) { return a / b; }
  static F Sqrt(F a) { return std::sqrt(a); }
  static F Fma(F a, F b, F c) { return std::fma(a, b, c); }

  // memcpy, since an array may start at any byte.
  static F Load(const float* from) {
    F x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  static void Store(float* to, F x) { std::memcpy(to, &x, sizeof(x)); }

  static F LoadBf16(const std::uint16_t* from) {
    std::uint16_t half;
    std::memcpy(&half, from, sizeof(half));
    const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    F x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }
  // Nearest, ties away from zero; every NaN becomes 0x7fc0.
  static void StoreBf16(std::uint16_t* to, F x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    const auto half =
        static_cast<std::uint16_t>(x == x ? (bits + 0x8000u) >> 16 : 0x7fc0u);
    std::memcpy(to, &half, sizeof(half));
  }

  // A vector of one lane has no part: a count is never below 1.
  static F Load(const float* from, std::size_t) { return Load(from); }
  static void Store(float* to, F x, std::size_t) { Store(to, x); }
  static F LoadBf16(const std::uint16_t* from, std::size_t) {
    return LoadBf16(from);
  }
  static void StoreBf16(std::uint16_t* to, F x, std::size_t) {
    StoreBf16(to, x);
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_VEC_SCALAR_H_
