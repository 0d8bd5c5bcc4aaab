// The kernels over many runs of parameters, cut into pieces for the threads of
// a pool. No two runs may overlap.
#ifndef CPU_OPS_UPDATE_H_
#define CPU_OPS_UPDATE_H_

#include <cstddef>
#include <vector>

#include "kernels.h"
#include "segments.h"

namespace sojax {

// Each of these returns the items of a job that goes through all the segments,
// with pieces for so many threads.
Items StepItems(const KernelTable& kernels, const AdamParams& params,
                std::vector<AdamSegment> segments, std::size_t num_threads);
Items WidenItems(const KernelTable& kernels,
                 std::vector<AccumulateSegment> segments,
                 std::size_t num_threads);
Items AccumulateItems(const KernelTable& kernels,
                      std::vector<AccumulateSegment> segments,
                      std::size_t num_threads);
Items SquaresItems(const KernelTable& kernels,
                   std::vector<SquaresSegment> segments,
                   std::size_t num_threads);
Items NarrowItems(const KernelTable& kernels,
                  std::vector<NarrowSegment> segments, std::size_t num_threads);

}  // namespace sojax

#endif  // CPU_OPS_UPDATE_H_
