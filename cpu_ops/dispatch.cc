#include "dispatch.h"

namespace sojax {

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
#endif
  tables.push_back(&kScalarKernels);
  return tables;
}

}  // namespace sojax
