// The length of the vectors that code for a fixed length runs with.
#ifndef CPU_OPS_SVE_LENGTH_H_
#define CPU_OPS_SVE_LENGTH_H_

#include <sys/prctl.h>

#include <cstdint>

// Linux's <linux/prctl.h> may be older than SVE.
#ifndef PR_SVE_SET_VL
#define PR_SVE_SET_VL 50
#define PR_SVE_VL_LEN_MASK 0xffff
#endif

namespace sojax {
namespace {

// Gives the calling thread vectors of the length that this file is compiled
// for, and puts back its own. A CPU of that length is left alone. What the
// vectors hold is lost past 128 bits, so they belong into a function that is
// not inlined.
class ScopedSveLength {
 public:
  ScopedSveLength() : saved_(NumBytes()) {
    if (saved_ != kNumBytes) Set(kNumBytes);
  }
  ~ScopedSveLength() {
    if (saved_ != kNumBytes) Set(saved_);
  }
  ScopedSveLength(const ScopedSveLength&) = delete;
  ScopedSveLength& operator=(const ScopedSveLength&) = delete;

 private:
  static constexpr std::uint64_t kNumBytes = __ARM_FEATURE_SVE_BITS / 8;

  // The intrinsic for it would be taken to be the constant.
  static std::uint64_t NumBytes() {
    std::uint64_t num_bytes;
    asm volatile("rdvl %0, #1" : "=r"(num_bytes));
    return num_bytes;
  }
  static void Set(std::uint64_t num_bytes) {
    const int state = prctl(PR_SVE_SET_VL, num_bytes);
    // dispatch.cc chooses a length that the CPU has. With another the kernel
    // would write past its arrays.
    if (state < 0 ||
        static_cast<std::uint64_t>(state & PR_SVE_VL_LEN_MASK) != num_bytes) {
      __builtin_trap();
    }
  }

  const std::uint64_t saved_;
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_SVE_LENGTH_H_
