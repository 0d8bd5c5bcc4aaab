// The floating-point mode that the kernels run in.
#ifndef CPU_OPS_FP_MODE_H_
#define CPU_OPS_FP_MODE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#error "only x86-64 and aarch64 are supported"
#endif
#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS > 0
#include "sve_length.h"
#endif

namespace sojax {
// Internal linkage: this header is compiled for several instruction sets, and
// the linker must not pick one set's copy for another's caller.
namespace {

#if defined(__x86_64__)
using FpWord = std::uint32_t;
// MXCSR: exceptions masked, nearest even, no FTZ, no DAZ.
constexpr FpWord kDefaultFpMode = 0x1f80;
[[maybe_unused]] FpWord ReadFpMode() { return _mm_getcsr(); }
[[maybe_unused]] void WriteFpMode(FpWord word) { _mm_setcsr(word); }
#else
using FpWord = std::uint64_t;
// FPCR, and above it FPSR, each of which uses 32 bits: no traps, nearest even,
// no FZ, no DN; no sticky flags.
constexpr FpWord kDefaultFpMode = 0;
[[maybe_unused]] FpWord ReadFpMode() {
  FpWord control, status;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("mrs %0, fpsr" : "=r"(status));
  return status << 32 | control;
}
[[maybe_unused]] void WriteFpMode(FpWord word) {
  asm volatile("msr fpcr, %0" : : "r"(word & 0xffffffffu) : "memory");
  asm volatile("msr fpsr, %0" : : "r"(word >> 32) : "memory");
}
#endif

// Sets the IEEE defaults for a scope and puts back what was there. The
// compiler may move arithmetic across the switch, so the arithmetic belongs
// into a function that is not inlined. Where vectors have a fixed length, that
// is set as well.
class ScopedDefaultFpMode {
 public:
  ScopedDefaultFpMode() : saved_(ReadFpMode()) { WriteFpMode(kDefaultFpMode); }
  ~ScopedDefaultFpMode() { WriteFpMode(saved_); }
  ScopedDefaultFpMode(const ScopedDefaultFpMode&) = delete;
  ScopedDefaultFpMode& operator=(const ScopedDefaultFpMode&) = delete;

 private:
#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS > 0
  const ScopedSveLength length_;
#endif
  FpWord saved_;
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_FP_MODE_H_
