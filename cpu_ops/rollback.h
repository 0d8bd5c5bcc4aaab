// Steps of many runs of parameters that are recorded, and taken back.
#ifndef CPU_OPS_ROLLBACK_H_
#define CPU_OPS_ROLLBACK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "record.h"
#include "segments.h"

namespace sojax {

// A recorded chunk: so many elements of one segment, the last may be short.
// 64 KiB of each float array, so that they are still in the second-level cache
// if the chunk has to be undone at once.
inline constexpr std::size_t kRecordChunkElems = std::size_t{1} << 14;
static_assert(kRecordChunkElems % kChunkElems == 0);
static_assert(kRecordChunkElems % kGroupElems == 0);

// The offset of a chunk that was not stepped.
inline constexpr std::int64_t kLeftOut = -1;

// The record of one step of a list of segments. Codes and offsets of the
// segments follow each other.
struct Record {
  RecordForm form;
  std::uint8_t* codes;    // CodesBytes of each segment
  float* escapes;         // of all chunks, in no order of the chunks
  std::size_t capacity;   // of escapes
  std::int64_t* offsets;  // of each chunk's first escape; kLeftOut; then their
                          // number
};

// Returns the number of recorded chunks of n elements.
constexpr std::size_t NumRecordChunks(std::size_t n) {
  return n / kRecordChunkElems + (n % kRecordChunkElems != 0);
}

// Room for the escapes of one chunk for each thread of a pool.
class Scratch {
 public:
  explicit Scratch(std::size_t num_threads);
  float* of(std::size_t thread) const { return floats_[thread].get(); }

 private:
  std::vector<std::unique_ptr<float[]>> floats_;
};

// Each of these returns the items of a job that goes through all the segments.
//
// RecordItems takes and records a step. A chunk whose escapes do not fit in
// what is left of `escapes` is taken back at once; it and those that come
// after are left out. What is in the weights of a chunk left out is not
// specified. Sums of squares are written for all.
Items RecordItems(const KernelTable& kernels, const AdamParams& params,
                  std::vector<AdamSegment> segments, const Record& record,
                  std::shared_ptr<const Scratch> scratch);
// Takes the step of the chunks that were left out.
Items FinishItems(const KernelTable& kernels, const AdamParams& params,
                  std::vector<AdamSegment> segments, const Record& record);
// Undoes the step of the chunks that were not.
Items UndoItems(const KernelTable& kernels, const AdamParams& params,
                std::vector<AdamSegment> segments, const Record& record);
// Takes the step of all chunks with another grad_scale, after undoing it where
// it was taken.
Items RedoItems(const KernelTable& kernels, const AdamParams& params,
                float new_grad_scale, std::vector<AdamSegment> segments,
                const Record& record);

}  // namespace sojax

#endif  // CPU_OPS_ROLLBACK_H_
