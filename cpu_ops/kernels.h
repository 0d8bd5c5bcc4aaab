// The table of kernels that each instruction set provides.
#ifndef CPU_OPS_KERNELS_H_
#define CPU_OPS_KERNELS_H_

#include "accumulate.h"
#include "adam.h"
#include "elem_types.h"

namespace sojax {

// The instances of one instruction set, by the types of their arrays.
struct KernelTable {
  const char* isa;  // "avx512", "avx2", "sve", "neon", "scalar"
  unsigned vector_bits;
  AdamStepFn adam_step[kNumGradTypes][kNumWeightTypes];
  AccumulateFn widen[kNumGradTypes];
  AccumulateFn accumulate[kNumGradTypes];
};

// Call only the tables that dispatch.h lists: the others may hold
// instructions that this CPU does not have.
extern const KernelTable kScalarKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#elif defined(__aarch64__)
extern const KernelTable kNeonKernels;
// For vectors of exactly so many bits, which they see to themselves where the
// CPU's are longer.
extern const KernelTable kSve128Kernels;
extern const KernelTable kSve256Kernels;
extern const KernelTable kSve512Kernels;
#endif

}  // namespace sojax

#endif  // CPU_OPS_KERNELS_H_
