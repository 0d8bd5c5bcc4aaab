#include "dispatch.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>

// Linux's <asm/hwcap.h> and <linux/prctl.h>, which may be older than the CPU.
#ifndef HWCAP_SVE
#define HWCAP_SVE (1UL << 22)
#endif
#ifndef PR_SVE_GET_VL
#define PR_SVE_GET_VL 51
#define PR_SVE_VL_LEN_MASK 0xffff
#endif
#endif

namespace sojax {

#if defined(__aarch64__)
namespace {

// Returns the instance for the longest vectors that the calling thread has, or
// nullptr without SVE. A CPU has all powers of two from 128 bits to its longest
// (Arm ARM, "SVE vector length"), so one with other vectors has these too.
const KernelTable* SveKernels() {
  if ((getauxval(AT_HWCAP) & HWCAP_SVE) == 0) return nullptr;
  const int state = prctl(PR_SVE_GET_VL);
  if (state < 0) return nullptr;
  const int bits = 8 * (state & PR_SVE_VL_LEN_MASK);
  if (bits >= 512) return &kSve512Kernels;
  return bits >= 256 ? &kSve256Kernels : &kSve128Kernels;
}

}  // namespace
#endif

std::vector<const KernelTable*> AvailableKernels() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  // These read cpuid and, for the wide registers, XCR0: what the operating
  // system saves on a context switch.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    tables.push_back(&kAvx512Kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    tables.push_back(&kAvx2Kernels);
  }
#elif defined(__aarch64__)
  if (const KernelTable* sve = SveKernels()) tables.push_back(sve);
  tables.push_back(&kNeonKernels);
#endif
  tables.push_back(&kScalarKernels);
  return tables;
}

}  // namespace sojax
