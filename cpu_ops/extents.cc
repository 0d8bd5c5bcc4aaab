#include "extents.h"

#include <algorithm>
#include <cstddef>

namespace sojax {

void SortExtents(std::vector<Extent>& extents) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.start < b.start; });
}

// In order of their starts, an extent overlaps an earlier one of the other
// list exactly if it overlaps the one that reaches furthest.
bool Conflict(const std::vector<Extent>& a, const std::vector<Extent>& b) {
  const std::vector<Extent>* lists[] = {&a, &b};
  std::size_t next[] = {0, 0};
  std::uintptr_t furthest[] = {0, 0};
  std::uintptr_t furthest_written[] = {0, 0};
  while (next[0] < a.size() || next[1] < b.size()) {
    const bool from_b =
        next[0] == a.size() ||
        (next[1] < b.size() && b[next[1]].start < a[next[0]].start);
    const std::size_t own = from_b ? 1 : 0;
    const std::size_t other = 1 - own;
    const Extent& extent = (*lists[own])[next[own]++];
    if (extent.start < furthest_written[other]) return true;
    if (extent.written && extent.start < furthest[other]) return true;
    furthest[own] = std::max(furthest[own], extent.end);
    if (extent.written) {
      furthest_written[own] = std::max(furthest_written[own], extent.end);
    }
  }
  return false;
}

}  // namespace sojax
