// Memory set to zero, and by that brought into RAM, by the threads of a pool.
#ifndef CPU_OPS_ZERO_H_
#define CPU_OPS_ZERO_H_

#include <cstddef>
#include <vector>

#include "segments.h"

namespace sojax {

// The bytes of one array.
struct ZeroSegment {
  std::byte* start;
  std::size_t num_bytes;
};

// Returns the items of a job that zeroes all the segments.
Items ZeroItems(const std::vector<ZeroSegment>& segments);

}  // namespace sojax

#endif  // CPU_OPS_ZERO_H_
