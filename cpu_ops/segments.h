// Runs of parameters and gradients, as Python hands them over, and the pieces
// that threads take of them.
#ifndef CPU_OPS_SEGMENTS_H_
#define CPU_OPS_SEGMENTS_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "accumulate.h"
#include "adam.h"
#include "elem_types.h"

namespace sojax {

// A run of parameters; `layout` is the place in kLayouts.
struct AdamSegment {
  AdamBuffers buffers;
  std::size_t num_elems;
  std::size_t layout;
};

// A run of gradients that are added up.
struct AccumulateSegment {
  AccumulateBuffers buffers;
  std::size_t num_elems;
  GradType grad_type;
};

// A run of gradients whose squares are added up.
struct SquaresSegment {
  SquaresBuffers buffers;
  std::size_t num_elems;
  GradType grad_type;
};

// A run of masters that are rounded.
struct NarrowSegment {
  const float* p;
  void* weight;
  std::size_t num_elems;
  WeightType weight_type;
};

// What a Job does: run(item, thread) for each item.
struct Items {
  std::size_t num_items;
  std::function<void(std::size_t item, std::size_t thread)> run;
};

// The elements start..start + num_elems - 1 of a segment.
struct Piece {
  std::size_t segment;
  std::size_t start;
  std::size_t num_elems;
};

// Appends pieces of at most `limit` elements to the list.
void CutSegment(std::size_t segment, std::size_t num_elems, std::size_t limit,
                std::vector<Piece>& pieces);

// Returns the buffers from element i on, a multiple of kChunkElems if there
// are sums of squares.
AdamBuffers BuffersAt(const AdamSegment& segment, std::size_t i);
const void* GradAt(const void* grad, GradType type, std::size_t i);
void* WeightAt(void* weight, WeightType type, std::size_t i);

}  // namespace sojax

#endif  // CPU_OPS_SEGMENTS_H_
