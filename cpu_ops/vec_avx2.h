// Eight floats in a 256-bit register (AVX2 and FMA).
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
  static constexpr std::size_t kLanes = 8;
  static constexpr bool kStreams = true;

  static F Set(float x) { return _mm256_set1_ps(x); }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  static F Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, F x) { _mm256_storeu_ps(to, x); }
  static F LoadBf16(const std::uint16_t* from) {
    return Widen(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from)));
  }
  static void StoreBf16(std::uint16_t* to, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), Narrow(x));
  }

  static F Load(const float* from, std::size_t count) {
    return _mm256_maskload_ps(from, FirstLanes(count));
  }
  static void Store(float* to, F x, std::size_t count) {
    _mm256_maskstore_ps(to, FirstLanes(count), x);
  }
  // AVX2 masks 32-bit lanes only, so halves go through a copy.
  static F LoadBf16(const std::uint16_t* from, std::size_t count) {
    __m128i halves = _mm_setzero_si128();
    std::memcpy(&halves, from, count * sizeof(*from));
    return Widen(halves);
  }
  static void StoreBf16(std::uint16_t* to, F x, std::size_t count) {
    const __m128i halves = Narrow(x);
    std::memcpy(to, &halves, count * sizeof(*to));
  }

  static void Stream(float* to, F x) { _mm256_stream_ps(to, x); }
  static void StreamBf16(std::uint16_t* to, F x) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), Narrow(x));
  }
  static void Fence() { _mm_sfence(); }

 private:
  static __m256i FirstLanes(std::size_t count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
  }
  static F Widen(__m128i halves) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  // Nearest, ties away from zero; every NaN becomes 0x7fc0.
  static __m128i Narrow(F x) {
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000)),
        16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i words =
        _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(words),
                            _mm256_extracti128_si256(words, 1));
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_VEC_AVX2_H_
