// The kernels over many runs of parameters and all threads of a pool.
#ifndef CPU_OPS_UPDATE_H_
#define CPU_OPS_UPDATE_H_

#include <cstddef>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace sojax {

// A run of parameters and the types of its buffers.
struct AdamSegment {
  AdamBuffers buffers;
  std::size_t num_elems;
  GradType grad_type;
  WeightType weight_type;
};

// A run of gradients and their type.
struct AccumulateSegment {
  AccumulateBuffers buffers;
  std::size_t num_elems;
  GradType grad_type;
};

// Each of these goes through all the segments, cut into pieces that the
// threads of the pool take in turn. It blocks until done. No two segments may
// overlap.
void AdamUpdate(Pool& pool, const KernelTable& kernels,
                const AdamParams& params,
                const std::vector<AdamSegment>& segments);
void Widen(Pool& pool, const KernelTable& kernels,
           const std::vector<AccumulateSegment>& segments);
void Accumulate(Pool& pool, const KernelTable& kernels,
                const std::vector<AccumulateSegment>& segments);

}  // namespace sojax

#endif  // CPU_OPS_UPDATE_H_
