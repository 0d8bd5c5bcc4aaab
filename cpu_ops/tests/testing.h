// Arrays with numbers in them, and checks, for the tests of the kernels and of
// the pool.
#ifndef CPU_OPS_TESTS_TESTING_H_
#define CPU_OPS_TESTS_TESTING_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../dispatch.h"
#include "../record.h"
#include "../segments.h"
#include "check.h"

namespace sojax {
namespace {

template <class Error, class Function>
[[maybe_unused]] std::string MessageOf(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

const AdamParams kParams = {0.9f,  0.95f,  0.1f,   0.05f, 2.0f,
                            1e-9f, -1e-3f, -1e-4f, 1e-8f, 0.5f};

// A heap block of exactly n elements that starts `offset` bytes past an
// address that malloc aligned; ASan watches both of its ends.
template <class T>
class Block {
 public:
  Block(std::size_t n, std::size_t offset)
      : offset_(offset), memory_(offset + n * sizeof(T)) {}
  T* data() { return reinterpret_cast<T*>(memory_.data() + offset_); }
  void Set(std::size_t i, T value) {
    std::memcpy(memory_.data() + offset_ + i * sizeof(T), &value, sizeof(T));
  }
  bool operator==(const Block& other) const {
    return std::equal(begin(), memory_.end(), other.begin(),
                      other.memory_.end());
  }

 private:
  auto begin() const {
    return memory_.begin() + static_cast<std::ptrdiff_t>(offset_);
  }

  std::size_t offset_;
  std::vector<unsigned char> memory_;
};

// A segment with numbers in it, some of them subnormal.
struct State {
  State(std::size_t n, std::size_t offset, float scale)
      : p(n, offset),
        mu(n, offset),
        nu(n, offset),
        grad(n, offset),
        grad_half(n, offset),
        weight(n, offset),
        weight_half(n, offset),
        low(n, offset),
        sum(n, offset),
        sumsq(NumChunks(n), offset),
        num_elems(n) {
    for (std::size_t i = 0; i < n; ++i) {
      const float x = scale * static_cast<float>(i % 17 + 1);
      p.Set(i, x);
      mu.Set(i, -x);
      nu.Set(i, x);
      grad.Set(i, x);
      // Finite in either type, since NaN may differ in its payload.
      grad_half.Set(i, static_cast<std::uint16_t>(0x3f00 + i % 0x2000));
      weight_half.Set(i, static_cast<std::uint16_t>(0x3f00 + i % 256));
      low.Set(i, static_cast<std::int16_t>(i * 977));
      sum.Set(i, x / 3);
    }
  }

  // The high halves of a split master are weight_half. `fused`: the gradient is
  // added to `sum`, and sums of squares are written.
  AdamSegment Segment(std::size_t layout_index, bool fused = false) {
    const Layout& layout = kLayouts[layout_index];
    AdamSegment segment{};
    AdamBuffers& b = segment.buffers;
    b.p = p.data();
    if (layout.master == MasterType::kSplit) {
      b.p = weight_half.data();
      b.p_low = low.data();
    }
    b.mu = mu.data();
    b.nu = nu.data();
    b.grad = GradData(layout.grad);
    if (layout.weight == WeightType::kFloat32) b.weight = weight.data();
    if (layout.weight == WeightType::kBfloat16 ||
        layout.weight == WeightType::kFloat16) {
      b.weight = weight_half.data();
    }
    if (fused) {
      b.sum = sum.data();
      b.sumsq = sumsq.data();
    }
    segment.num_elems = num_elems;
    segment.layout = layout_index;
    return segment;
  }

  // Adds to p, and writes sums of squares if `squares`.
  AccumulateSegment SumSegment(GradType grad_type, bool squares) {
    return {{p.data(), GradData(grad_type), squares ? sumsq.data() : nullptr},
            num_elems,
            grad_type};
  }

  const void* GradData(GradType grad_type) {
    if (grad_type == GradType::kFloat32) return grad.data();
    return grad_half.data();
  }

  bool operator==(const State& other) const {
    return p == other.p && mu == other.mu && nu == other.nu &&
           grad == other.grad && weight == other.weight &&
           weight_half == other.weight_half && low == other.low &&
           sumsq == other.sumsq;
  }

  Block<float> p, mu, nu, grad;
  Block<std::uint16_t> grad_half;
  Block<float> weight;
  Block<std::uint16_t> weight_half;
  Block<std::int16_t> low;
  Block<float> sum;
  Block<double> sumsq;
  std::size_t num_elems;
};

[[maybe_unused]] void Step(const KernelTable& kernels,
                           const AdamSegment& segment) {
  kernels.layouts[segment.layout].step(kParams, segment.buffers,
                                       segment.num_elems);
}

[[maybe_unused]] void Sum(const KernelTable& kernels, bool adds,
                          const AccumulateSegment& segment) {
  const auto& functions = adds ? kernels.accumulate : kernels.widen;
  functions[static_cast<std::size_t>(segment.grad_type)](segment.buffers,
                                                         segment.num_elems);
}

// memcmp takes no null pointer, not even of nothing.
[[maybe_unused]] bool SameBytes(const void* a, const void* b,
                                std::size_t num_bytes) {
  return num_bytes == 0 || std::memcmp(a, b, num_bytes) == 0;
}

// A record with no byte to spare, as ASan sees it, but for what puts the codes
// on a cache line.
struct RecordBlock {
  RecordBlock(RecordForm record_form, std::size_t n)
      : form(record_form),
        num_bytes(CodesBytes(form, n)),
        codes(static_cast<std::uint8_t*>(
            std::aligned_alloc(64, num_bytes == 0 ? 64 : num_bytes))),
        escapes(MaxEscapes(n), 0) {}
  ~RecordBlock() { std::free(codes); }
  RecordBlock(const RecordBlock&) = delete;
  RecordBlock& operator=(const RecordBlock&) = delete;

  bool operator==(RecordBlock& other) {
    return count == other.count && SameBytes(codes, other.codes, num_bytes) &&
           SameBytes(escapes.data(), other.escapes.data(),
                     count * sizeof(float));
  }

  const RecordForm form;
  const std::size_t num_bytes;
  std::uint8_t* const codes;
  Block<float> escapes;
  std::size_t count = 0;
};

// Whether what an undo restores is the same.
[[maybe_unused]] bool SameState(const State& a, const State& b,
                                const AdamSegment& segment) {
  const bool is_split = kLayouts[segment.layout].master == MasterType::kSplit;
  return a.mu == b.mu && a.nu == b.nu &&
         (is_split ? a.weight_half == b.weight_half && a.low == b.low
                   : a.p == b.p);
}

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_TESTS_TESTING_H_
