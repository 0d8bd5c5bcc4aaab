// The floating-point mode that the kernels run in.
#ifndef CPU_OPS_FP_MODE_H_
#define CPU_OPS_FP_MODE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif !defined(__aarch64__)
#error "only x86-64 and aarch64 are supported"
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
// FPCR: no traps, nearest even, no FZ, no DN.
constexpr FpWord kDefaultFpMode = 0;
[[maybe_unused]] FpWord ReadFpMode() {
  FpWord word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
[[maybe_unused]] void WriteFpMode(FpWord word) {
  asm volatile("msr fpcr, %0" : : "r"(word) : "memory");
}
#endif

// Sets the IEEE defaults for a scope and puts back what was there. The
// compiler may move arithmetic across the switch, so the arithmetic belongs
// into a function that is not inlined.
class ScopedDefaultFpMode {
 public:
  ScopedDefaultFpMode() : saved_(ReadFpMode()) { WriteFpMode(kDefaultFpMode); }
  ~ScopedDefaultFpMode() { WriteFpMode(saved_); }
  ScopedDefaultFpMode(const ScopedDefaultFpMode&) = delete;
  ScopedDefaultFpMode& operator=(const ScopedDefaultFpMode&) = delete;

 private:
  FpWord saved_;
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_FP_MODE_H_
