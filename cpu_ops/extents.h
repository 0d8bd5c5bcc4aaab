// The bytes that arrays occupy.
#ifndef CPU_OPS_EXTENTS_H_
#define CPU_OPS_EXTENTS_H_

#include <cstdint>
#include <vector>

namespace sojax {

// The bytes of one array, at least one, and whether they are written.
struct Extent {
  std::uintptr_t start;
  std::uintptr_t end;
  bool written;
};

// Sorts by start, as Conflict needs it.
void SortExtents(std::vector<Extent>& extents);

// Returns whether a byte that one list writes is in the other. Both are sorted.
// O(k).
bool Conflict(const std::vector<Extent>& a, const std::vector<Extent>& b);

}  // namespace sojax

#endif  // CPU_OPS_EXTENTS_H_
