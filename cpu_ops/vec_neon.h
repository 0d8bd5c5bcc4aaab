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
  static constexpr std::size_t kLanes = 8;
  static constexpr unsigned kVectorBits = 128;
  // As in vec_sve.h.
  static constexpr bool kStreams = false;

  static F Set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static F Add(F a, F b) {
    return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
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

  static F WidenBf16(Halves x) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(x, 16))};
  }
  static Halves NarrowBf16(F x) {
    const uint16x4_t low = UpperHalves(RoundBf16(x.low));
    return vshrn_high_n_u32(low, RoundBf16(x.high), 16);
  }
  static F WidenF16(Halves x) {
    const float16x8_t halves = vreinterpretq_f16_u16(x);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  static Halves NarrowF16(F x) {
    const Halves rounded =
        vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high));
    const uint16x8_t is_number =
        vuzp1q_u16(vreinterpretq_u16_u32(vceqq_f32(x.low, x.low)),
                   vreinterpretq_u16_u32(vceqq_f32(x.high, x.high)));
    return vbslq_u16(is_number, rounded, vdupq_n_u16(0x7e00));
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
  // The bfloat16 is the upper half of each.
  static uint32x4_t RoundBf16(float32x4_t x) {
    const uint32x4_t rounded =
        vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x8000));
    return vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
  }
  static uint16x4_t UpperHalves(uint32x4_t x) { return vshrn_n_u32(x, 16); }
};

using Neon = Pair<NeonVector>;

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_VEC_NEON_H_
