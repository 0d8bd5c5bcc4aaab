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
  static constexpr std::size_t kLanes = 8;
  static constexpr unsigned kVectorBits = 256;
  static constexpr bool kStreams = true;

  static F Set(float x) { return _mm256_set1_ps(x); }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

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
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_VEC_AVX2_H_
