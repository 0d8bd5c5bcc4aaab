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
  using Halves = std::uint16_t;
  using Doubles = double;
  using Ints = std::uint32_t;  // two's complement
  using Mask = bool;
  static constexpr std::size_t kLanes = 1;
  static constexpr unsigned kVectorBits = 32;
  static constexpr bool kStreams = false;

  static F Set(float x) { return x; }
  static F Add(F a, F b) { return a + b; }
  static F Sub(F a, F b) { return a - b; }
  static F Mul(F a, F b) { return a * b; }
  static F Div(F a, F b) { return a / b; }
  static F Sqrt(F a) { return std::sqrt(a); }
  static F Fma(F a, F b, F c) { return std::fma(a, b, c); }
  static F Below(F x, F limit) { return x < limit ? x : limit; }

  // memcpy, since an array may start at any byte.
  static F Load(const float* from) {
    F x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  static void Store(float* to, F x) { std::memcpy(to, &x, sizeof(x)); }

  static Halves LoadHalves(const std::uint16_t* from) {
    Halves x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  static void StoreHalves(std::uint16_t* to, Halves x) {
    std::memcpy(to, &x, sizeof(x));
  }

  // A vector of one lane has no part: a count is never below 1.
  static F Load(const float* from, std::size_t) { return Load(from); }
  static void Store(float* to, F x, std::size_t) { Store(to, x); }
  static Halves LoadHalves(const std::uint16_t* from, std::size_t) {
    return LoadHalves(from);
  }
  static void StoreHalves(std::uint16_t* to, Halves x, std::size_t) {
    StoreHalves(to, x);
  }

  static F WidenBf16(Halves x) {
    return FromBits(static_cast<std::uint32_t>(x) << 16);
  }
  static Halves NarrowBf16(F x) {
    const std::uint32_t bits = Bits(x);
    return static_cast<Halves>(IsNan(bits) ? 0x7fc0u : (bits + 0x8000u) >> 16);
  }

  static F WidenF16(Halves x) {
    const std::uint32_t sign = (x & 0x8000u) << 16;
    std::uint32_t magnitude = (x & 0x7fffu) << 13;
    if (magnitude >= 0x1fu << 23) {  // infinite or NaN, which becomes quiet
      magnitude += (0xffu - 0x1fu) << 23;
      if (IsNan(magnitude)) magnitude |= 1u << 22;
    } else if (magnitude >= 1u << 23) {
      magnitude += kBiasDifference << 23;
    } else if (magnitude != 0) {
      // Subnormal: the leading bit moves up to where floats imply it.
      std::uint32_t exponent = kBiasDifference + 1;
      for (; magnitude < 1u << 23; magnitude <<= 1) --exponent;
      magnitude += (exponent - 1) << 23;
    }
    return FromBits(sign | magnitude);
  }
  static Halves NarrowF16(F x) {
    const std::uint32_t bits = Bits(x);
    if (IsNan(bits)) return 0x7e00;
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    std::uint32_t half;
    if (magnitude >= 0x477ff000u) {  // 65520: half a step past the largest
      half = 0x7c00;
    } else if (magnitude >= 0x38800000u) {  // 2^-14: the smallest normal
      half = ShiftToEven(magnitude - (kBiasDifference << 23), 13);
    } else if (magnitude >= 0x33000000u) {  // 2^-25: half of the smallest
      // Subnormal: a count of 2^-24.
      const std::uint32_t significand = (magnitude & 0x7fffffu) | 1u << 23;
      half = ShiftToEven(significand, 126 - (magnitude >> 23));
    } else {
      half = 0;
    }
    return static_cast<Halves>(sign | half);
  }

  static F QuietNan(F x) { return IsNan(Bits(x)) ? FromBits(0x7fc00000u) : x; }
  static F JoinHalves(Halves high, Halves low) {
    return FromBits((static_cast<std::uint32_t>(high) << 16) +
                    SignExtend(low, 16));
  }
  static Halves HighHalves(F x) {
    return static_cast<Halves>((Bits(x) + 0x8000u) >> 16);
  }
  static Halves LowHalves(F x) { return static_cast<Halves>(Bits(x)); }

  static Ints Bits(F x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
  }
  static F FromBits(Ints bits) {
    F x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
  }
  static Ints AddInts(Ints a, Ints b) { return a + b; }
  static Ints SubInts(Ints a, Ints b) { return a - b; }
  static Mask IsBeyond(Ints x, int limit) {
    const auto bound = static_cast<std::uint32_t>(limit);
    return x + bound > 2 * bound;
  }
  static Mask IsEqual(Ints x, int value) {
    return x == static_cast<std::uint32_t>(value);
  }
  static Mask Or(Mask a, Mask b) { return a || b; }
  static bool Any(Mask x) { return x; }

  static Ints LoadBytes(const std::int8_t* from) {
    return static_cast<Ints>(*from);
  }
  static void StoreBytes(std::int8_t* to, Ints a, Ints b) {
    to[0] = static_cast<std::int8_t>(a);
    to[1] = static_cast<std::int8_t>(b);
  }
  template <std::size_t kHalf>
  static Ints LoadNibbles(const std::uint8_t* from) {
    return SignExtend(*from >> (4 * kHalf) & 15u, 4);
  }
  static void StoreNibbles(std::uint8_t* to, Ints a, Ints b) {
    *to = static_cast<std::uint8_t>((a & 15u) | (b & 15u) << 4);
  }

  static Doubles Zeros() { return 0; }
  // The square has 48 bits, so that adding it in a fused step, as the others
  // do, gives the same.
  static Doubles AddSquares(Doubles sums, F x) {
    const auto wide = static_cast<double>(x);
    return sums + wide * wide;
  }
  static void StoreDoubles(double* to, Doubles x) { *to = x; }

 private:
  // Between the exponents of one number as float and as float16.
  static constexpr std::uint32_t kBiasDifference = 127 - 15;

  // Returns the two's complement of 32 bits of a number of fewer.
  static std::uint32_t SignExtend(std::uint32_t x, unsigned num_bits) {
    const std::uint32_t sign = 1u << (num_bits - 1);
    return (x ^ sign) - sign;
  }
  static bool IsNan(std::uint32_t bits) {
    return (bits & 0x7fffffffu) > 0x7f800000u;
  }
  // Returns x / 2^shift, rounded to nearest even.
  static std::uint32_t ShiftToEven(std::uint32_t x, std::uint32_t shift) {
    const std::uint32_t odd = x >> shift & 1u;
    return (x + (1u << (shift - 1)) - 1u + odd) >> shift;
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_VEC_SCALAR_H_
