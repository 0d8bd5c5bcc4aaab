// The table of kernels that each instruction set provides.
#ifndef CPU_OPS_KERNELS_H_
#define CPU_OPS_KERNELS_H_

#include "accumulate.h"
#include "adam.h"
#include "elem_types.h"
#include "record.h"

namespace sojax {

// The kernels that depend on the layout. To undo takes no weights, so that
// layouts which differ only there share the function.
struct LayoutKernels {
  AdamStepFn step;
  RecordFn record[kNumRecordForms];
  UndoFn undo[kNumRecordForms];
  RedoFn redo[kNumRecordForms];
};

// The instances of one instruction set.
struct KernelTable {
  const char* isa;  // "avx512", "avx2", "sve", "neon", "scalar"
  unsigned vector_bits;
  LayoutKernels layouts[kNumLayouts];
  AccumulateFn widen[kNumGradTypes];
  AccumulateFn accumulate[kNumGradTypes];
  SquaresFn squares[kNumGradTypes];
  NarrowFn narrow[kNumWeightTypes];
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
