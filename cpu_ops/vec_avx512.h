// Sixteen floats in a 512-bit register (AVX-512 F, BW, DQ, VL).
#ifndef CPU_OPS_VEC_AVX512_H_
#define CPU_OPS_VEC_AVX512_H_

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own intrinsics start from an undefined register and are then
// reported for it (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace sojax {
namespace {

struct Avx512 {
  using F = __m512;
  using Halves = __m256i;
  struct Doubles {
    __m512d low, high;
  };
  using Ints = __m512i;
  using Mask = __mmask16;
  static constexpr std::size_t kLanes = 16;
  static constexpr unsigned kVectorBits = 512;
  static constexpr bool kStreams = true;

  static F Set(float x) { return _mm512_set1_ps(x); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static F Sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F Below(F x, F limit) { return _mm512_min_ps(x, limit); }

  static F Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, F x) { _mm512_storeu_ps(to, x); }
  static Halves LoadHalves(const std::uint16_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(from));
  }
  static void StoreHalves(std::uint16_t* to, Halves x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), x);
  }

  static F Load(const float* from, std::size_t count) {
    return _mm512_maskz_loadu_ps(FirstLanes(count), from);
  }
  static void Store(float* to, F x, std::size_t count) {
    _mm512_mask_storeu_ps(to, FirstLanes(count), x);
  }
  static Halves LoadHalves(const std::uint16_t* from, std::size_t count) {
    return _mm256_maskz_loadu_epi16(FirstLanes(count), from);
  }
  static void StoreHalves(std::uint16_t* to, Halves x, std::size_t count) {
    _mm256_mask_storeu_epi16(to, FirstLanes(count), x);
  }

  static void Stream(float* to, F x) { _mm512_stream_ps(to, x); }
  static void StreamHalves(std::uint16_t* to, Halves x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), x);
  }
  static void Fence() { _mm_sfence(); }

  static F WidenBf16(Halves x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static Halves NarrowBf16(F x) {
    const __m512i rounded = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)),
        16);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_mov_epi32(rounded, IsNan(x), _mm512_set1_epi32(0x7fc0)));
  }
  static F WidenF16(Halves x) { return _mm512_cvtph_ps(x); }
  static Halves NarrowF16(F x) {
    const Halves rounded =
        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm256_mask_mov_epi16(rounded, IsNan(x), _mm256_set1_epi16(0x7e00));
  }

  static F QuietNan(F x) {
    return _mm512_mask_mov_ps(x, IsNan(x), FromBits(Repeat(0x7fc00000)));
  }
  static F JoinHalves(Halves high, Halves low) {
    return FromBits(
        _mm512_add_epi32(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16),
                         _mm512_cvtepi16_epi32(low)));
  }
  static Halves HighHalves(F x) {
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(AddInts(Bits(x), Repeat(0x8000)), 16));
  }
  static Halves LowHalves(F x) { return _mm512_cvtepi32_epi16(Bits(x)); }

  static Ints Bits(F x) { return _mm512_castps_si512(x); }
  static F FromBits(Ints x) { return _mm512_castsi512_ps(x); }
  static Ints AddInts(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints SubInts(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
  static Mask IsBeyond(Ints x, int limit) {
    return _mm512_cmpgt_epu32_mask(AddInts(x, Repeat(limit)),
                                   Repeat(2 * limit));
  }
  static Mask IsEqual(Ints x, int value) {
    return _mm512_cmpeq_epi32_mask(x, Repeat(value));
  }
  static Mask Or(Mask a, Mask b) { return _kor_mask16(a, b); }
  static bool Any(Mask x) { return x != 0; }

  static Ints LoadBytes(const std::int8_t* from) {
    return _mm512_cvtepi8_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
  }
  static void StoreBytes(std::int8_t* to, Ints a, Ints b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), PackBytes(a, b));
  }
  static void StreamBytes(std::int8_t* to, Ints a, Ints b) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), PackBytes(a, b));
  }
  template <std::size_t kHalf>
  static Ints LoadNibbles(const std::uint8_t* from) {
    const __m128i bytes = _mm_loadl_epi64(
        reinterpret_cast<const __m128i_u*>(from + kHalf * kLanes / 2));
    return NibblesOfBytes(_mm512_cvtepu8_epi64(bytes));
  }
  static void StoreNibbles(std::uint8_t* to, Ints a, Ints b) {
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), PackNibbles(a, b));
  }
  static void StreamNibbles(std::uint8_t* to, Ints a, Ints b) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), PackNibbles(a, b));
  }

  static Doubles Zeros() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
  static Doubles AddSquares(Doubles sums, F x) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    return {_mm512_fmadd_pd(low, low, sums.low),
            _mm512_fmadd_pd(high, high, sums.high)};
  }
  static void StoreDoubles(double* to, Doubles x) {
    _mm512_store_pd(to, x.low);
    _mm512_store_pd(to + 8, x.high);
  }

 private:
  static __mmask16 FirstLanes(std::size_t count) {
    return static_cast<__mmask16>((1u << count) - 1u);
  }
  static __mmask16 IsNan(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  static Ints Repeat(int x) { return _mm512_set1_epi32(x); }
  static __m256i PackBytes(Ints a, Ints b) {
    return _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
  }
  static __m128i PackNibbles(Ints a, Ints b) {
    return _mm_unpacklo_epi64(BytesOfNibbles(a), BytesOfNibbles(b));
  }
  // Pairs of lanes are 64-bit lanes: the odd one's code moves to bit 4.
  static __m128i BytesOfNibbles(Ints x) {
    const Ints nibbles = _mm512_and_si512(x, Repeat(15));
    return _mm512_cvtepi64_epi8(
        _mm512_or_si512(nibbles, _mm512_srli_epi64(nibbles, 28)));
  }
  // And back, with the sign of four bits.
  static Ints NibblesOfBytes(__m512i pairs) {
    const Ints nibbles = _mm512_and_si512(
        _mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28)), Repeat(15));
    return SubInts(_mm512_xor_si512(nibbles, Repeat(8)), Repeat(8));
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_VEC_AVX512_H_
