#include "segments.h"

#include <algorithm>

namespace sojax {

void CutSegment(std::size_t segment, std::size_t num_elems, std::size_t limit,
                std::vector<Piece>& pieces) {
  for (std::size_t i = 0; i < num_elems; i += limit) {
    pieces.push_back({segment, i, std::min(limit, num_elems - i)});
  }
}

AdamBuffers BuffersAt(const AdamSegment& segment, std::size_t i) {
  const Layout& layout = kLayouts[segment.layout];
  AdamBuffers b = segment.buffers;
  if (layout.master == MasterType::kSplit) {
    b.p = static_cast<std::uint16_t*>(b.p) + i;
    b.p_low += i;
  } else {
    b.p = static_cast<float*>(b.p) + i;
  }
  b.mu += i;
  b.nu += i;
  if (b.sum != nullptr) b.sum += i;
  b.grad = GradAt(b.grad, layout.grad, i);
  b.weight = WeightAt(b.weight, layout.weight, i);
  if (b.sumsq != nullptr) b.sumsq += i / kChunkElems;
  return b;
}

const void* GradAt(const void* grad, GradType type, std::size_t i) {
  const std::size_t elem_bytes = type == GradType::kFloat32 ? 4 : 2;
  return static_cast<const char*>(grad) + i * elem_bytes;
}

void* WeightAt(void* weight, WeightType type, std::size_t i) {
  if (type == WeightType::kNone) return weight;
  const std::size_t elem_bytes = type == WeightType::kFloat32 ? 4 : 2;
  return static_cast<char*>(weight) + i * elem_bytes;
}

}  // namespace sojax
