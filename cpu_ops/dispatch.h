// Which instances of the kernels this machine can run.
#ifndef CPU_OPS_DISPATCH_H_
#define CPU_OPS_DISPATCH_H_

#include <vector>

#include "kernels.h"

namespace sojax {

// Returns the tables that this CPU and operating system can run, best first.
// The last one is always the scalar twin.
std::vector<const KernelTable*> AvailableKernels();

}  // namespace sojax

#endif  // CPU_OPS_DISPATCH_H_
