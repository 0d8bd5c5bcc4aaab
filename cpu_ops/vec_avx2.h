// Eight floats in a 256-bit register (AVX2, FMA and F16C).
#ifndef CPU_OPS_VEC_AVX2_H_
#define CPU_OPS_VEC_AVX2_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sojax {
namespace {

struct Avx2 {
  using F = __m256;
  using Halves = __m128i;
  struct Doubles {
    __m256d low, high;
  };
  using Ints = __m256i;
  using Mask = __m256i;
  static constexpr std::size_t kLanes = 8;
  static constexpr unsigned kVectorBits = 256;
  static constexpr bool kStreams = true;

  static F Set(float x) { return _mm256_set1_ps(x); }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F Below(F x, F limit) { return _mm256_min_ps(x, limit); }

  static F Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, F x) { _mm256_storeu_ps(to, x); }
  static Halves LoadHalves(const std::uint16_t* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from));
  }
  static void StoreHalves(std::uint16_t* to, Halves x) {
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), x);
  }

  static F Load(const float* from, std::size_t count) {
    return _mm256_maskload_ps(from, FirstLanes(count));
  }
  static void Store(float* to, F x, std::size_t count) {
    _mm256_maskstore_ps(to, FirstLanes(count), x);
  }
  // AVX2 masks 32-bit lanes only, so halves go through a copy.
  static Halves LoadHalves(const std::uint16_t* from, std::size_t count) {
    Halves x = _mm_setzero_si128();
    std::memcpy(&x, from, count * sizeof(*from));
    return x;
  }
  static void StoreHalves(std::uint16_t* to, Halves x, std::size_t count) {
    std::memcpy(to, &x, count * sizeof(*to));
  }

  static void Stream(float* to, F x) { _mm256_stream_ps(to, x); }
  static void StreamHalves(std::uint16_t* to, Halves x) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), x);
  }
  static void Fence() { _mm_sfence(); }

  static F WidenBf16(Halves x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static Halves NarrowBf16(F x) {
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000)),
        16);
    const __m256i words =
        _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), IsNan(x));
    return _mm_packus_epi32(_mm256_castsi256_si128(words),
                            _mm256_extracti128_si256(words, 1));
  }
  static F WidenF16(Halves x) { return _mm256_cvtph_ps(x); }
  static Halves NarrowF16(F x) {
    const Halves rounded =
        _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i nan = IsNan(x);
    return _mm_blendv_epi8(rounded, _mm_set1_epi16(0x7e00),
                           _mm_packs_epi32(_mm256_castsi256_si128(nan),
                                           _mm256_extracti128_si256(nan, 1)));
  }

  static F QuietNan(F x) {
    return FromBits(_mm256_blendv_epi8(Bits(x), Repeat(0x7fc00000), IsNan(x)));
  }
  static F JoinHalves(Halves high, Halves low) {
    return FromBits(AddInts(_mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16),
                            _mm256_cvtepi16_epi32(low)));
  }
  static Halves HighHalves(F x) {
    return PackHalves(_mm256_srli_epi32(AddInts(Bits(x), Repeat(0x8000)), 16));
  }
  static Halves LowHalves(F x) {
    return PackHalves(_mm256_and_si256(Bits(x), Repeat(0xffff)));
  }

  static Ints Bits(F x) { return _mm256_castps_si256(x); }
  static F FromBits(Ints x) { return _mm256_castsi256_ps(x); }
  static Ints AddInts(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static Ints SubInts(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
  static Mask IsBeyond(Ints x, int limit) {
    const Ints shifted = AddInts(x, Repeat(limit));
    return _mm256_cmpeq_epi32(_mm256_max_epu32(shifted, Repeat(2 * limit + 1)),
                              shifted);
  }
  static Mask IsEqual(Ints x, int value) {
    return _mm256_cmpeq_epi32(x, Repeat(value));
  }
  static Mask Or(Mask a, Mask b) { return _mm256_or_si256(a, b); }
  static bool Any(Mask x) { return _mm256_testz_si256(x, x) == 0; }

  static Ints LoadBytes(const std::int8_t* from) {
    return _mm256_cvtepi8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i_u*>(from)));
  }
  static void StoreBytes(std::int8_t* to, Ints a, Ints b) {
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), PackBytes(a, b));
  }
  static void StreamBytes(std::int8_t* to, Ints a, Ints b) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), PackBytes(a, b));
  }
  template <std::size_t kHalf>
  static Ints LoadNibbles(const std::uint8_t* from) {
    std::int32_t bytes;
    std::memcpy(&bytes, from + kHalf * kLanes / 2, sizeof(bytes));
    return NibblesOfBytes(_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes)));
  }
  static void StoreNibbles(std::uint8_t* to, Ints a, Ints b) {
    _mm_storel_epi64(reinterpret_cast<__m128i_u*>(to), PackNibbles(a, b));
  }
  static void StreamNibbles(std::uint8_t* to, Ints a, Ints b) {
    _mm_stream_si64(reinterpret_cast<long long*>(to),
                    _mm_cvtsi128_si64(PackNibbles(a, b)));
  }

  static Doubles Zeros() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }
  static Doubles AddSquares(Doubles sums, F x) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    return {_mm256_fmadd_pd(low, low, sums.low),
            _mm256_fmadd_pd(high, high, sums.high)};
  }
  static void StoreDoubles(double* to, Doubles x) {
    _mm256_store_pd(to, x.low);
    _mm256_store_pd(to + 4, x.high);
  }

 private:
  static __m256i FirstLanes(std::size_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
  }
  static __m256i IsNan(F x) {
    return _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  static Ints Repeat(int x) { return _mm256_set1_epi32(x); }
  // Words below 2^16 become halves.
  static Halves PackHalves(Ints words) {
    return _mm_packus_epi32(_mm256_castsi256_si128(words),
                            _mm256_extracti128_si256(words, 1));
  }
  // Packing keeps to 128-bit lanes, so the quarters are put in order between.
  static __m128i PackBytes(Ints a, Ints b) {
    const Ints words =
        _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0b11'01'10'00);
    return _mm_packs_epi16(_mm256_castsi256_si128(words),
                           _mm256_extracti128_si256(words, 1));
  }
  static __m128i PackNibbles(Ints a, Ints b) {
    // Bytes 0 and 8 of each 128-bit lane are of a, 4 and 12 of b.
    const Ints bytes = _mm256_or_si256(
        BytesOfNibbles(a), _mm256_slli_epi64(BytesOfNibbles(b), 32));
    const Ints order =
        _mm256_broadcastsi128_si256(_mm_cvtsi32_si128(0x0c'04'08'00));
    const Ints grouped = _mm256_shuffle_epi8(bytes, order);
    return _mm_unpacklo_epi16(_mm256_castsi256_si128(grouped),
                              _mm256_extracti128_si256(grouped, 1));
  }
  // Pairs of lanes are 64-bit lanes: the odd one's code moves to bit 4.
  static Ints BytesOfNibbles(Ints x) {
    const Ints nibbles = _mm256_and_si256(x, Repeat(15));
    return _mm256_and_si256(
        _mm256_or_si256(nibbles, _mm256_srli_epi64(nibbles, 28)),
        _mm256_set1_epi64x(255));
  }
  // And back, with the sign of four bits.
  static Ints NibblesOfBytes(__m256i pairs) {
    const Ints nibbles = _mm256_and_si256(
        _mm256_or_si256(pairs, _mm256_slli_epi64(pairs, 28)), Repeat(15));
    return SubInts(_mm256_xor_si256(nibbles, Repeat(8)), Repeat(8));
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_VEC_AVX2_H_
