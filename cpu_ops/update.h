// The AdamW step over many runs of parameters and all threads of a pool.
#ifndef CPU_OPS_UPDATE_H_
#define CPU_OPS_UPDATE_H_

#include <cstddef>
#include <vector>

#include "adam.h"
#include "pool.h"

namespace sojax {

// A run of parameters and the types of its buffers.
struct AdamSegment {
  AdamBuffers buffers;
  std::size_t num_elems;
  GradType grad_type;
  WeightType weight_type;
};

// Steps all the segments, cut into chunks that the threads of the pool take in
// turn. Blocks until done. No two segments may overlap.
void AdamUpdate(Pool& pool, const KernelTable& kernels,
                const AdamParams& params,
                const std::vector<AdamSegment>& segments);

}  // namespace sojax

#endif  // CPU_OPS_UPDATE_H_
