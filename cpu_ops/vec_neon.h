// Sixteen floats in four 128-bit registers (Advanced SIMD, which every aarch64
// CPU has).
#ifndef CPU_OPS_VEC_NEON_H_
#define CPU_OPS_VEC_NEON_H_

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "vec_pair.h"

namespace sojax {
namespace {

// Eight floats, since eight halves fill one register.
struct NeonVector {
  struct F {
    float32x4_t low, high;
  };
  using Halves = uint16x8_t;
  struct Doubles {
    float64x2_t x0, x1, x2, x3;
  };
  struct Ints {
    uint32x4_t low, high;
  };
  using Mask = Ints;  // all bits of a lane, or none
  static constexpr std::size_t kLanes = 8;
  static constexpr unsigned kVectorBits = 128;
  // As in vec_sve.h.
  static constexpr bool kStreams = false;

  static F Set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static F Add(F a, F b) {
    return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
  }
  static F Sub(F a, F b) {
    return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)};
  }
  static F Mul(F a, F b) {
    return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
  }
  static F Div(F a, F b) {
    return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)};
  }
  static F Sqrt(F a) { return {vsqrtq_f32(a.low), vsqrtq_f32(a.high)}; }
  static F Fma(F a, F b, F c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
  }

  static F Below(F x, F limit) {
    return {vbslq_f32(vcltq_f32(x.low, limit.low), x.low, limit.low),
            vbslq_f32(vcltq_f32(x.high, limit.high), x.high, limit.high)};
  }

  // An array may start at any byte, which these instructions do not mind.
  static F Load(const float* from) {
    return {vld1q_f32(from), vld1q_f32(from + 4)};
  }
  static void Store(float* to, F x) {
    vst1q_f32(to, x.low);
    vst1q_f32(to + 4, x.high);
  }
  static Halves LoadHalves(const std::uint16_t* from) {
    return vld1q_u16(from);
  }
  static void StoreHalves(std::uint16_t* to, Halves x) { vst1q_u16(to, x); }

  // There are no masks, so parts go through a copy.
  static F Load(const float* from, std::size_t count) {
    float lanes[kLanes] = {};
    std::memcpy(lanes, from, count * sizeof(*from));
    return Load(lanes);
  }
  static void Store(float* to, F x, std::size_t count) {
    float lanes[kLanes];
    Store(lanes, x);
    std::memcpy(to, lanes, count * sizeof(*to));
  }
  static Halves LoadHalves(const std::uint16_t* from, std::size_t count) {
    Halves x = vdupq_n_u16(0);
    std::memcpy(&x, from, count * sizeof(*from));
    return x;
  }
  static void StoreHalves(std::uint16_t* to, Halves x, std::size_t count) {
    std::memcpy(to, &x, count * sizeof(*to));
  }

  static F WidenBf16(Halves x) { return FromBits(AsUpperHalves(x)); }
  static Halves NarrowBf16(F x) {
    return vbslq_u16(IsNumber(x), HighHalves(x), vdupq_n_u16(0x7fc0));
  }
  static F WidenF16(Halves x) {
    const float16x8_t halves = vreinterpretq_f16_u16(x);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  static Halves NarrowF16(F x) {
    const Halves rounded =
        vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high));
    return vbslq_u16(IsNumber(x), rounded, vdupq_n_u16(0x7e00));
  }

  static F QuietNan(F x) {
    const F nan = FromBits(Repeat(0x7fc00000));
    return {vbslq_f32(vceqq_f32(x.low, x.low), x.low, nan.low),
            vbslq_f32(vceqq_f32(x.high, x.high), x.high, nan.high)};
  }
  static F JoinHalves(Halves high, Halves low) {
    return FromBits(
        AddInts(AsUpperHalves(high), Widen(vreinterpretq_s16_u16(low))));
  }
  static Halves HighHalves(F x) {
    return UpperHalves(AddInts(Bits(x), Repeat(0x8000)));
  }
  static Halves LowHalves(F x) { return LowerHalves(Bits(x)); }

  static Ints Bits(F x) {
    return {vreinterpretq_u32_f32(x.low), vreinterpretq_u32_f32(x.high)};
  }
  static F FromBits(Ints x) {
    return {vreinterpretq_f32_u32(x.low), vreinterpretq_f32_u32(x.high)};
  }
  static Ints AddInts(Ints a, Ints b) {
    return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)};
  }
  static Ints SubInts(Ints a, Ints b) {
    return {vsubq_u32(a.low, b.low), vsubq_u32(a.high, b.high)};
  }
  static Mask IsBeyond(Ints x, int limit) {
    const auto bound = static_cast<std::uint32_t>(limit);
    const Ints shifted = AddInts(x, Repeat(bound));
    const uint32x4_t largest = vdupq_n_u32(2 * bound);
    return {vcgtq_u32(shifted.low, largest), vcgtq_u32(shifted.high, largest)};
  }
  static Mask IsEqual(Ints x, int value) {
    const uint32x4_t other = vdupq_n_u32(static_cast<std::uint32_t>(value));
    return {vceqq_u32(x.low, other), vceqq_u32(x.high, other)};
  }
  static Mask Or(Mask a, Mask b) {
    return {vorrq_u32(a.low, b.low), vorrq_u32(a.high, b.high)};
  }
  static bool Any(Mask x) { return vmaxvq_u32(vorrq_u32(x.low, x.high)) != 0; }

  static Ints LoadBytes(const std::int8_t* from) {
    return Widen(vmovl_s8(vld1_s8(from)));
  }
  static void StoreBytes(std::int8_t* to, Ints a, Ints b) {
    vst1q_s8(to, vreinterpretq_s8_u8(LowerBytes(a, b)));
  }
  template <std::size_t kHalf>
  static Ints LoadNibbles(const std::uint8_t* from) {
    std::uint32_t bytes;
    std::memcpy(&bytes, from + kHalf * kLanes / 2, sizeof(bytes));
    // Shifted down from the top of a byte, a code keeps its sign.
    const int8x8_t odd = vreinterpret_s8_u32(vdup_n_u32(bytes));
    const int8x8_t even = vshl_n_s8(odd, 4);
    return Widen(vmovl_s8(vshr_n_s8(vzip1_s8(even, odd), 4)));
  }
  static void StoreNibbles(std::uint8_t* to, Ints a, Ints b) {
    // The odd code of each pair of bytes moves to bit 4 of the even one.
    const uint16x8_t pairs =
        vreinterpretq_u16_u8(vandq_u8(LowerBytes(a, b), vdupq_n_u8(15)));
    vst1_u8(to, vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 4))));
  }

  static Doubles Zeros() {
    const float64x2_t zero = vdupq_n_f64(0);
    return {zero, zero, zero, zero};
  }
  static Doubles AddSquares(Doubles sums, F x) {
    const float64x2_t x0 = vcvt_f64_f32(vget_low_f32(x.low));
    const float64x2_t x1 = vcvt_high_f64_f32(x.low);
    const float64x2_t x2 = vcvt_f64_f32(vget_low_f32(x.high));
    const float64x2_t x3 = vcvt_high_f64_f32(x.high);
    return {vfmaq_f64(sums.x0, x0, x0), vfmaq_f64(sums.x1, x1, x1),
            vfmaq_f64(sums.x2, x2, x2), vfmaq_f64(sums.x3, x3, x3)};
  }
  static void StoreDoubles(double* to, Doubles x) {
    vst1q_f64(to, x.x0);
    vst1q_f64(to + 2, x.x1);
    vst1q_f64(to + 4, x.x2);
    vst1q_f64(to + 6, x.x3);
  }

 private:
  static uint16x8_t IsNumber(F x) {
    return LowerHalves({vceqq_f32(x.low, x.low), vceqq_f32(x.high, x.high)});
  }
  static Ints Repeat(std::uint32_t x) {
    return {vdupq_n_u32(x), vdupq_n_u32(x)};
  }
  static Ints Widen(int16x8_t x) {
    return {vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(x))),
            vreinterpretq_u32_s32(vmovl_high_s16(x))};
  }
  static Ints AsUpperHalves(Halves x) {
    return {vshll_n_u16(vget_low_u16(x), 16), vshll_high_n_u16(x, 16)};
  }
  static Halves UpperHalves(Ints x) {
    return vuzp2q_u16(vreinterpretq_u16_u32(x.low),
                      vreinterpretq_u16_u32(x.high));
  }
  static Halves LowerHalves(Ints x) {
    return vuzp1q_u16(vreinterpretq_u16_u32(x.low),
                      vreinterpretq_u16_u32(x.high));
  }
  static uint8x16_t LowerBytes(Ints a, Ints b) {
    return vuzp1q_u8(vreinterpretq_u8_u16(LowerHalves(a)),
                     vreinterpretq_u8_u16(LowerHalves(b)));
  }
};

using Neon = Pair<NeonVector>;

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_VEC_NEON_H_
