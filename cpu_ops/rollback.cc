#include "rollback.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace sojax {
namespace {

// A chunk of a segment, with its number among all and its codes.
struct Chunk {
  Piece piece;
  std::size_t index;
  std::uint8_t* codes;
};

std::vector<Chunk> CutIntoChunks(const std::vector<AdamSegment>& segments,
                                 const Record& record) {
  std::vector<Chunk> chunks;
  std::uint8_t* codes = record.codes;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    std::vector<Piece> pieces;
    CutSegment(i, segments[i].num_elems, kRecordChunkElems, pieces);
    for (const Piece& piece : pieces) {
      chunks.push_back(
          {piece, chunks.size(), codes + CodesBytes(record.form, piece.start)});
    }
    codes += CodesBytes(record.form, segments[i].num_elems);
  }
  return chunks;
}

// Returns the items that call run(segment, chunk, thread) for all chunks.
template <class Function>
Items ForEachChunk(std::vector<AdamSegment> segments, const Record& record,
                   Function run) {
  std::vector<Chunk> chunks = CutIntoChunks(segments, record);
  const std::size_t num_items = chunks.size();
  return {num_items,
          [segments = std::move(segments), chunks = std::move(chunks),
           run = std::move(run)](std::size_t item, std::size_t thread) {
            const Chunk& chunk = chunks[item];
            run(segments[chunk.piece.segment], chunk, thread);
          }};
}

// The buffers of a chunk, without the sums of squares.
AdamBuffers ChunkBuffers(const AdamSegment& segment, const Chunk& chunk) {
  AdamBuffers b = BuffersAt(segment, chunk.piece.start);
  b.sumsq = nullptr;
  return b;
}

void StepChunk(const KernelTable& kernels, const AdamParams& params,
               const AdamSegment& segment, const Chunk& chunk) {
  kernels.layouts[segment.layout].step(params, ChunkBuffers(segment, chunk),
                                       chunk.piece.num_elems);
}

// The arrays of a record may start at any byte.
std::int64_t LoadOffset(const Record& record, std::size_t index) {
  std::int64_t offset;
  std::memcpy(&offset, record.offsets + index, sizeof(offset));
  return offset;
}

void StoreOffset(const Record& record, std::size_t index, std::int64_t offset) {
  std::memcpy(record.offsets + index, &offset, sizeof(offset));
}

// The escapes of all chunks, which take their places as they come.
class EscapeList {
 public:
  EscapeList(const Record& record, std::size_t num_chunks)
      : record_(record), num_chunks_(num_chunks) {}

  // Whether a chunk found no place.
  bool IsFull() const { return full_; }

  // Appends the escapes of a chunk. Returns whether there was room for them.
  bool Append(const Chunk& chunk, const float* escapes, std::size_t count) {
    std::size_t start = size_;
    do {
      if (count > record_.capacity - start) {
        full_ = true;
        return false;
      }
    } while (!size_.compare_exchange_weak(start, start + count));
    // memcpy takes no null pointer, not even of nothing.
    if (count != 0) {
      std::memcpy(record_.escapes + start, escapes, count * sizeof(float));
    }
    StoreOffset(record_, chunk.index, static_cast<std::int64_t>(start));
    return true;
  }

  void LeaveOut(const Chunk& chunk) {
    StoreOffset(record_, chunk.index, kLeftOut);
  }

  // To be called once for each chunk; the last call writes the total.
  void Finish() {
    if (++num_finished_ == num_chunks_) {
      StoreOffset(record_, num_chunks_,
                  static_cast<std::int64_t>(size_.load()));
    }
  }

 private:
  const Record record_;
  const std::size_t num_chunks_;
  std::atomic<std::size_t> size_{0};
  std::atomic<std::size_t> num_finished_{0};
  std::atomic<bool> full_{false};
};

void AddSquares(const KernelTable& kernels, const AdamSegment& segment,
                const Chunk& chunk) {
  const AdamBuffers b = BuffersAt(segment, chunk.piece.start);
  if (b.sumsq == nullptr) return;
  const auto grad = static_cast<std::size_t>(kLayouts[segment.layout].grad);
  kernels.squares[grad]({b.sum, b.grad, b.sumsq}, chunk.piece.num_elems);
}

void RecordChunk(const KernelTable& kernels, const AdamParams& params,
                 const AdamSegment& segment, const Chunk& chunk,
                 RecordForm form, EscapeList& list, float* scratch) {
  if (list.IsFull()) {
    AddSquares(kernels, segment, chunk);
    list.LeaveOut(chunk);
    return;
  }
  const LayoutKernels& functions = kernels.layouts[segment.layout];
  const std::size_t n = chunk.piece.num_elems;
  const auto form_index = static_cast<std::size_t>(form);
  const std::size_t count = functions.record[form_index](
      params, BuffersAt(segment, chunk.piece.start), chunk.codes, scratch, n);
  if (list.Append(chunk, scratch, count)) return;
  functions.undo[form_index](params, ChunkBuffers(segment, chunk), chunk.codes,
                             {scratch, count}, n);
  list.LeaveOut(chunk);
}

// Returns the escapes from those of a chunk on.
Escapes EscapesOf(const Record& record, const Chunk& chunk,
                  std::size_t num_chunks) {
  const std::int64_t start = LoadOffset(record, chunk.index);
  const std::int64_t end = LoadOffset(record, num_chunks);
  if (start < 0 || start > end ||
      static_cast<std::size_t>(end) > record.capacity) {
    throw std::logic_error("the offsets of the record are damaged");
  }
  return {record.escapes + start, static_cast<std::size_t>(end - start)};
}

void CheckCount(std::size_t num_taken, const Escapes& escapes) {
  if (num_taken > escapes.count) {
    throw std::logic_error(
        "the record has too few escapes: it is damaged, or of another step,"
        " and the state is no longer to be used");
  }
}

std::size_t CountChunks(const std::vector<AdamSegment>& segments) {
  std::size_t count = 0;
  for (const AdamSegment& segment : segments) {
    count += NumRecordChunks(segment.num_elems);
  }
  return count;
}

}  // namespace

Scratch::Scratch(std::size_t num_threads) {
  // Not initialized: only what is used takes up memory.
  for (std::size_t i = 0; i < num_threads; ++i) {
    floats_.emplace_back(new float[MaxEscapes(kRecordChunkElems)]);
  }
}

Items RecordItems(const KernelTable& kernels, const AdamParams& params,
                  std::vector<AdamSegment> segments, const Record& record,
                  std::shared_ptr<const Scratch> scratch) {
  auto list = std::make_shared<EscapeList>(record, CountChunks(segments));
  return ForEachChunk(
      std::move(segments), record,
      [&kernels, params, form = record.form, list = std::move(list),
       scratch = std::move(scratch)](const AdamSegment& segment,
                                     const Chunk& chunk, std::size_t thread) {
        RecordChunk(kernels, params, segment, chunk, form, *list,
                    scratch->of(thread));
        list->Finish();
      });
}

Items FinishItems(const KernelTable& kernels, const AdamParams& params,
                  std::vector<AdamSegment> segments, const Record& record) {
  return ForEachChunk(
      std::move(segments), record,
      [&kernels, params, record](const AdamSegment& segment, const Chunk& chunk,
                                 std::size_t) {
        if (LoadOffset(record, chunk.index) == kLeftOut) {
          StepChunk(kernels, params, segment, chunk);
        }
      });
}

Items UndoItems(const KernelTable& kernels, const AdamParams& params,
                std::vector<AdamSegment> segments, const Record& record) {
  const std::size_t num_chunks = CountChunks(segments);
  return ForEachChunk(
      std::move(segments), record,
      [&kernels, params, record, num_chunks](const AdamSegment& segment,
                                             const Chunk& chunk, std::size_t) {
        if (LoadOffset(record, chunk.index) == kLeftOut) return;
        const Escapes escapes = EscapesOf(record, chunk, num_chunks);
        const auto undo = kernels.layouts[segment.layout]
                              .undo[static_cast<std::size_t>(record.form)];
        CheckCount(undo(params, ChunkBuffers(segment, chunk), chunk.codes,
                        escapes, chunk.piece.num_elems),
                   escapes);
      });
}

Items RedoItems(const KernelTable& kernels, const AdamParams& params,
                float new_grad_scale, std::vector<AdamSegment> segments,
                const Record& record) {
  const std::size_t num_chunks = CountChunks(segments);
  AdamParams new_params = params;
  new_params.grad_scale = new_grad_scale;
  return ForEachChunk(
      std::move(segments), record,
      [&kernels, params, new_params, record, num_chunks](
          const AdamSegment& segment, const Chunk& chunk, std::size_t) {
        if (LoadOffset(record, chunk.index) == kLeftOut) {
          StepChunk(kernels, new_params, segment, chunk);
          return;
        }
        const Escapes escapes = EscapesOf(record, chunk, num_chunks);
        const auto redo = kernels.layouts[segment.layout]
                              .redo[static_cast<std::size_t>(record.form)];
        CheckCount(
            redo(params, new_params.grad_scale, ChunkBuffers(segment, chunk),
                 chunk.codes, escapes, chunk.piece.num_elems),
            escapes);
      });
}

}  // namespace sojax
