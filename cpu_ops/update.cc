#include "update.h"

#include <algorithm>
#include <atomic>

namespace sojax {
namespace {

// The bounds of a piece. The largest is 256 KiB of each float array, so that a
// 64 MiB bucket has hundreds and its threads end together; a quarter of it
// takes the same time (32M parameters, two Zen 5 cores). The smallest, 16 KiB,
// is a guess: a few microseconds, about what it takes to wake a thread.
constexpr std::size_t kMaxPieceElems = std::size_t{1} << 16;
constexpr std::size_t kMinPieceElems = std::size_t{1} << 12;
// A piece is a power of two in between, so that it has whole chunks.
static_assert(kMinPieceElems % kChunkElems == 0);

template <class Segment>
struct Piece {
  const Segment* segment;
  std::size_t start;
  std::size_t num_elems;
};

template <class Segment>
std::vector<Piece<Segment>> CutIntoPieces(const std::vector<Segment>& segments,
                                          std::size_t num_threads) {
  std::size_t total = 0;
  for (const Segment& segment : segments) total += segment.num_elems;
  // Powers of two keep the cuts on cache lines of an aligned array.
  std::size_t limit = kMaxPieceElems;
  while (limit > kMinPieceElems && limit * num_threads > total) limit /= 2;
  std::vector<Piece<Segment>> pieces;
  pieces.reserve(segments.size() + total / limit);
  for (const Segment& segment : segments) {
    for (std::size_t i = 0; i < segment.num_elems; i += limit) {
      pieces.push_back({&segment, i, std::min(limit, segment.num_elems - i)});
    }
  }
  return pieces;
}

// Calls run(piece) for all pieces of the segments, on the threads of the pool.
template <class Segment, class Function>
void ForEachPiece(Pool& pool, const std::vector<Segment>& segments,
                  const Function& run) {
  const auto pieces = CutIntoPieces(segments, pool.num_threads());
  if (pieces.empty()) return;
  std::atomic<std::size_t> next{0};
  pool.Run([&](std::size_t) {
    for (std::size_t i = next++; i < pieces.size(); i = next++) run(pieces[i]);
  });
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

void StepPiece(const KernelTable& kernels, const AdamParams& params,
               const Piece<AdamSegment>& piece) {
  const AdamSegment& segment = *piece.segment;
  const AdamBuffers& all = segment.buffers;
  const AdamBuffers buffers = {
      all.p + piece.start, all.mu + piece.start, all.nu + piece.start,
      GradAt(all.grad, segment.grad_type, piece.start),
      WeightAt(all.weight, segment.weight_type, piece.start)};
  kernels.adam_step[static_cast<std::size_t>(segment.grad_type)]
                   [static_cast<std::size_t>(segment.weight_type)](
                       params, buffers, piece.num_elems);
}

void AccumulatePiece(const AccumulateFn (&functions)[kNumGradTypes],
                     const Piece<AccumulateSegment>& piece) {
  const AccumulateSegment& segment = *piece.segment;
  AccumulateBuffers buffers = segment.buffers;
  buffers.sum += piece.start;
  buffers.grad = GradAt(buffers.grad, segment.grad_type, piece.start);
  if (buffers.sumsq != nullptr) buffers.sumsq += piece.start / kChunkElems;
  functions[static_cast<std::size_t>(segment.grad_type)](buffers,
                                                         piece.num_elems);
}

}  // namespace

void AdamUpdate(Pool& pool, const KernelTable& kernels,
                const AdamParams& params,
                const std::vector<AdamSegment>& segments) {
  ForEachPiece(pool, segments, [&](const Piece<AdamSegment>& piece) {
    StepPiece(kernels, params, piece);
  });
}

void Widen(Pool& pool, const KernelTable& kernels,
           const std::vector<AccumulateSegment>& segments) {
  ForEachPiece(pool, segments, [&](const Piece<AccumulateSegment>& piece) {
    AccumulatePiece(kernels.widen, piece);
  });
}

void Accumulate(Pool& pool, const KernelTable& kernels,
                const std::vector<AccumulateSegment>& segments) {
  ForEachPiece(pool, segments, [&](const Piece<AccumulateSegment>& piece) {
    AccumulatePiece(kernels.accumulate, piece);
  });
}

}  // namespace sojax
