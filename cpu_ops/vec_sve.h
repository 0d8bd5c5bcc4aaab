// Sixteen floats in four 128-bit, two 256-bit or one 512-bit SVE register: a
// file that includes this is compiled with -msve-vector-bits. Only what the
// first SVE has; SVE2 would save nothing here.
//
// Types of a fixed length may be members of a struct. Sixteen lanes are a
// register for each of the four pipes of Neoverse V2.
#ifndef CPU_OPS_VEC_SVE_H_
#define CPU_OPS_VEC_SVE_H_

#include <arm_sve.h>

#include <cstddef>
#include <cstdint>

#include "vec_pair.h"

namespace sojax {
namespace {

#define SOJAX_SVE_BITS __ARM_FEATURE_SVE_BITS
#define SOJAX_SVE_FIXED __attribute__((arm_sve_vector_bits(SOJAX_SVE_BITS)))
using SveFloats = svfloat32_t SOJAX_SVE_FIXED;
using SveWords = svuint32_t SOJAX_SVE_FIXED;
using SvePairs = svuint64_t SOJAX_SVE_FIXED;
using SveMask = svbool_t SOJAX_SVE_FIXED;
using SveDoubles = svfloat64_t SOJAX_SVE_FIXED;

// One register.
struct SveVector {
  using F = SveFloats;
  // Each in the lower half of a 32-bit lane; what the upper one holds does not
  // matter.
  using Halves = SveWords;
  struct Doubles {
    SveDoubles even, odd;
  };
  using Ints = SveWords;
  using Mask = SveMask;
  static constexpr std::size_t kLanes = SOJAX_SVE_BITS / 32;
  static constexpr unsigned kVectorBits = SOJAX_SVE_BITS;
  // The cores notice by themselves that whole lines are written (the "write
  // streaming mode" of Neoverse). Not measured.
  static constexpr bool kStreams = false;

  static F Set(float x) { return svdup_f32(x); }
  static F Add(F a, F b) { return svadd_f32_x(All(), a, b); }
  static F Sub(F a, F b) { return svsub_f32_x(All(), a, b); }
  static F Mul(F a, F b) { return svmul_f32_x(All(), a, b); }
  static F Div(F a, F b) { return svdiv_f32_x(All(), a, b); }
  static F Sqrt(F a) { return svsqrt_f32_x(All(), a); }
  static F Fma(F a, F b, F c) { return svmad_f32_x(All(), a, b, c); }

  static F Below(F x, F limit) {
    return svsel_f32(svcmplt_f32(All(), x, limit), x, limit);
  }

  static F Load(const float* from) { return svld1_f32(All(), from); }
  static void Store(float* to, F x) { svst1_f32(All(), to, x); }
  static Halves LoadHalves(const std::uint16_t* from) {
    return svld1uh_u32(All(), from);
  }
  static void StoreHalves(std::uint16_t* to, Halves x) {
    svst1h_u32(All(), to, x);
  }

  static F Load(const float* from, std::size_t count) {
    return svld1_f32(FirstLanes(count), from);
  }
  static void Store(float* to, F x, std::size_t count) {
    svst1_f32(FirstLanes(count), to, x);
  }
  static Halves LoadHalves(const std::uint16_t* from, std::size_t count) {
    return svld1uh_u32(FirstLanes(count), from);
  }
  static void StoreHalves(std::uint16_t* to, Halves x, std::size_t count) {
    svst1h_u32(FirstLanes(count), to, x);
  }

  static F WidenBf16(Halves x) {
    return svreinterpret_f32_u32(svlsl_n_u32_x(All(), x, 16));
  }
  static Halves NarrowBf16(F x) {
    return svdup_n_u32_m(HighHalves(x), IsNan(x), 0x7fc0);
  }
  static F WidenF16(Halves x) {
    return svcvt_f32_f16_x(All(), svreinterpret_f16_u32(x));
  }
  static Halves NarrowF16(F x) {
    const Halves rounded = svreinterpret_u32_f16(svcvt_f16_f32_x(All(), x));
    return svdup_n_u32_m(rounded, IsNan(x), 0x7e00);
  }

  static F QuietNan(F x) {
    return FromBits(svdup_n_u32_m(Bits(x), IsNan(x), 0x7fc00000));
  }
  static F JoinHalves(Halves high, Halves low) {
    return FromBits(AddInts(svlsl_n_u32_x(All(), high, 16),
                            svreinterpret_u32_s32(svexth_s32_x(
                                All(), svreinterpret_s32_u32(low)))));
  }
  static Halves HighHalves(F x) {
    return svlsr_n_u32_x(All(), svadd_n_u32_x(All(), Bits(x), 0x8000), 16);
  }
  static Halves LowHalves(F x) { return Bits(x); }

  static Ints Bits(F x) { return svreinterpret_u32_f32(x); }
  static F FromBits(Ints x) { return svreinterpret_f32_u32(x); }
  static Ints AddInts(Ints a, Ints b) { return svadd_u32_x(All(), a, b); }
  static Ints SubInts(Ints a, Ints b) { return svsub_u32_x(All(), a, b); }
  static Mask IsBeyond(Ints x, int limit) {
    const auto bound = static_cast<std::uint32_t>(limit);
    return svcmpgt_n_u32(All(), svadd_n_u32_x(All(), x, bound), 2 * bound);
  }
  static Mask IsEqual(Ints x, int value) {
    return svcmpeq_n_u32(All(), x, static_cast<std::uint32_t>(value));
  }
  static Mask Or(Mask a, Mask b) { return svorr_b_z(All(), a, b); }
  static bool Any(Mask x) { return svptest_any(All(), x); }

  static Ints LoadBytes(const std::int8_t* from) {
    return svreinterpret_u32_s32(svld1sb_s32(All(), from));
  }
  static void StoreBytes(std::int8_t* to, Ints a, Ints b) {
    StoreBytes(to, a);
    StoreBytes(to + kLanes, b);
  }
  template <std::size_t kHalf>
  static Ints LoadNibbles(const std::uint8_t* from) {
    // A byte for each pair of lanes; both codes move to the top of their lane.
    const SvePairs bytes = svld1ub_u64(All(), from + kHalf * kLanes / 2);
    const SvePairs tops = svorr_u64_x(All(), svlsl_n_u64_x(All(), bytes, 28),
                                      svlsl_n_u64_x(All(), bytes, 56));
    return svreinterpret_u32_s32(
        svasr_n_s32_x(All(), svreinterpret_s32_u64(tops), 28));
  }
  static void StoreNibbles(std::uint8_t* to, Ints a, Ints b) {
    StoreNibbles(to, a);
    StoreNibbles(to + kLanes / 2, b);
  }

  static Doubles Zeros() { return {svdup_f64(0), svdup_f64(0)}; }
  static Doubles AddSquares(Doubles sums, F x) {
    // A conversion reads the lower float of each 64 bits.
    const SveFloats shifted = svreinterpret_f32_u64(
        svlsr_n_u64_x(All(), svreinterpret_u64_f32(x), 32));
    const SveDoubles even = svcvt_f64_f32_x(All(), x);
    const SveDoubles odd = svcvt_f64_f32_x(All(), shifted);
    return {svmla_f64_x(All(), sums.even, even, even),
            svmla_f64_x(All(), sums.odd, odd, odd)};
  }
  static void StoreDoubles(double* to, Doubles x) {
    svst2_f64(All(), to, svcreate2_f64(x.even, x.odd));
  }

 private:
  static svbool_t All() { return svptrue_b8(); }
  static svbool_t FirstLanes(std::size_t count) {
    return svwhilelt_b32_u64(0, count);
  }
  static svbool_t IsNan(F x) { return svcmpuo_f32(All(), x, x); }
  static void StoreBytes(std::int8_t* to, Ints x) {
    svst1b_s32(All(), to, svreinterpret_s32_u32(x));
  }
  // The odd code of each pair of lanes moves to bit 4 of the even one.
  static void StoreNibbles(std::uint8_t* to, Ints x) {
    const SvePairs pairs = svreinterpret_u64_u32(svand_n_u32_x(All(), x, 15));
    svst1b_u64(All(), to,
               svorr_u64_x(All(), pairs, svlsr_n_u64_x(All(), pairs, 28)));
  }
};

#if SOJAX_SVE_BITS == 128
using Sve = Pair<Pair<SveVector>>;
#elif SOJAX_SVE_BITS == 256
using Sve = Pair<SveVector>;
#elif SOJAX_SVE_BITS == 512
using Sve = SveVector;
#else
#error "compile with -msve-vector-bits=128, 256 or 512"
#endif
static_assert(Sve::kLanes == 16);

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_VEC_SVE_H_
