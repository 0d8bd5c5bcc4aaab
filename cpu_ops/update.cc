#include "update.h"

#include <algorithm>
#include <utility>

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

// Returns the items that call run(segment, piece) for all pieces.
template <class Segment, class Function>
Items ForEachPiece(std::vector<Segment> segments, std::size_t num_threads,
                   Function run) {
  std::size_t total = 0;
  for (const Segment& segment : segments) total += segment.num_elems;
  // Powers of two keep the cuts on cache lines of an aligned array.
  std::size_t limit = kMaxPieceElems;
  while (limit > kMinPieceElems && limit * num_threads > total) limit /= 2;
  std::vector<Piece> pieces;
  pieces.reserve(segments.size() + total / limit);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    CutSegment(i, segments[i].num_elems, limit, pieces);
  }
  const std::size_t num_items = pieces.size();
  return {num_items,
          [segments = std::move(segments), pieces = std::move(pieces),
           run = std::move(run)](std::size_t item, std::size_t) {
            run(segments[pieces[item].segment], pieces[item]);
          }};
}

Items SumItems(const AccumulateFn (&functions)[kNumGradTypes],
               std::vector<AccumulateSegment> segments,
               std::size_t num_threads) {
  return ForEachPiece(
      std::move(segments), num_threads,
      [&functions](const AccumulateSegment& segment, const Piece& piece) {
        AccumulateBuffers b = segment.buffers;
        b.sum += piece.start;
        b.grad = GradAt(b.grad, segment.grad_type, piece.start);
        if (b.sumsq != nullptr) b.sumsq += piece.start / kChunkElems;
        functions[static_cast<std::size_t>(segment.grad_type)](b,
                                                               piece.num_elems);
      });
}

}  // namespace

Items StepItems(const KernelTable& kernels, const AdamParams& params,
                std::vector<AdamSegment> segments, std::size_t num_threads) {
  return ForEachPiece(
      std::move(segments), num_threads,
      [&kernels, params](const AdamSegment& segment, const Piece& piece) {
        kernels.layouts[segment.layout].step(
            params, BuffersAt(segment, piece.start), piece.num_elems);
      });
}

Items WidenItems(const KernelTable& kernels,
                 std::vector<AccumulateSegment> segments,
                 std::size_t num_threads) {
  return SumItems(kernels.widen, std::move(segments), num_threads);
}

Items AccumulateItems(const KernelTable& kernels,
                      std::vector<AccumulateSegment> segments,
                      std::size_t num_threads) {
  return SumItems(kernels.accumulate, std::move(segments), num_threads);
}

Items SquaresItems(const KernelTable& kernels,
                   std::vector<SquaresSegment> segments,
                   std::size_t num_threads) {
  return ForEachPiece(
      std::move(segments), num_threads,
      [&kernels](const SquaresSegment& segment, const Piece& piece) {
        SquaresBuffers b = segment.buffers;
        if (b.sum != nullptr) b.sum += piece.start;
        b.grad = GradAt(b.grad, segment.grad_type, piece.start);
        b.sumsq += piece.start / kChunkElems;
        kernels.squares[static_cast<std::size_t>(segment.grad_type)](
            b, piece.num_elems);
      });
}

Items NarrowItems(const KernelTable& kernels,
                  std::vector<NarrowSegment> segments,
                  std::size_t num_threads) {
  return ForEachPiece(
      std::move(segments), num_threads,
      [&kernels](const NarrowSegment& segment, const Piece& piece) {
        kernels.narrow[static_cast<std::size_t>(segment.weight_type)](
            segment.p + piece.start,
            WeightAt(segment.weight, segment.weight_type, piece.start),
            piece.num_elems);
      });
}

}  // namespace sojax
