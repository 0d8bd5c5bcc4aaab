#include "zero.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace sojax {
namespace {

// Pieces end where huge pages do, so that no two threads ask for the same one:
// both would clear one, and one be thrown away.
constexpr std::size_t kPieceBytes = std::size_t{2} << 20;

}  // namespace

Items ZeroItems(const std::vector<ZeroSegment>& segments) {
  std::vector<ZeroSegment> pieces;
  for (const ZeroSegment& segment : segments) {
    std::size_t done = 0;
    while (done < segment.num_bytes) {
      std::byte* const start = segment.start + done;
      const std::size_t into_page =
          reinterpret_cast<std::uintptr_t>(start) % kPieceBytes;
      const std::size_t num_bytes =
          std::min(kPieceBytes - into_page, segment.num_bytes - done);
      pieces.push_back({start, num_bytes});
      done += num_bytes;
    }
  }
  const std::size_t num_items = pieces.size();
  return {num_items,
          [pieces = std::move(pieces)](std::size_t item, std::size_t) {
            std::memset(pieces[item].start, 0, pieces[item].num_bytes);
          }};
}

}  // namespace sojax
