#include "update.h"

#include <algorithm>
#include <atomic>

namespace sojax {
namespace {

// The bounds of a chunk. The largest is 256 KiB of each float array, so that a
// 64 MiB bucket has hundreds and its threads end together; a quarter of it
// takes the same time (32M parameters, two Zen 5 cores). The smallest, 16 KiB,
// is a guess: a few microseconds, about what it takes to wake a thread.
constexpr std::size_t kMaxChunkElems = std::size_t{1} << 16;
constexpr std::size_t kMinChunkElems = std::size_t{1} << 12;

struct Chunk {
  const AdamSegment* segment;
  std::size_t start;
  std::size_t num_elems;
};

std::vector<Chunk> CutIntoChunks(const std::vector<AdamSegment>& segments,
                                 std::size_t num_threads) {
  std::size_t total = 0;
  for (const AdamSegment& segment : segments) total += segment.num_elems;
  // Powers of two keep the cuts on cache lines of an aligned array.
  std::size_t limit = kMaxChunkElems;
  while (limit > kMinChunkElems && limit * num_threads > total) limit /= 2;
  std::vector<Chunk> chunks;
  chunks.reserve(segments.size() + total / limit);
  for (const AdamSegment& segment : segments) {
    for (std::size_t i = 0; i < segment.num_elems; i += limit) {
      chunks.push_back({&segment, i, std::min(limit, segment.num_elems - i)});
    }
  }
  return chunks;
}

void StepChunk(const KernelTable& kernels, const AdamParams& params,
               const Chunk& chunk) {
  const AdamSegment& segment = *chunk.segment;
  const std::size_t grad_bytes =
      segment.grad_type == GradType::kFloat32 ? 4 : 2;
  const std::size_t weight_bytes =
      segment.weight_type == WeightType::kFloat32 ? 4 : 2;
  AdamBuffers buffers = segment.buffers;
  buffers.p += chunk.start;
  buffers.mu += chunk.start;
  buffers.nu += chunk.start;
  buffers.grad =
      static_cast<const char*>(buffers.grad) + chunk.start * grad_bytes;
  if (segment.weight_type != WeightType::kNone) {
    buffers.weight =
        static_cast<char*>(buffers.weight) + chunk.start * weight_bytes;
  }
  kernels.adam_step[static_cast<std::size_t>(segment.grad_type)]
                   [static_cast<std::size_t>(segment.weight_type)](
                       params, buffers, chunk.num_elems);
}

}  // namespace

void AdamUpdate(Pool& pool, const KernelTable& kernels,
                const AdamParams& params,
                const std::vector<AdamSegment>& segments) {
  const std::vector<Chunk> chunks = CutIntoChunks(segments, pool.num_threads());
  if (chunks.empty()) return;
  std::atomic<std::size_t> next{0};
  pool.Run([&](std::size_t) {
    for (std::size_t i = next++; i < chunks.size(); i = next++) {
      StepChunk(kernels, params, chunks[i]);
    }
  });
}

}  // namespace sojax
