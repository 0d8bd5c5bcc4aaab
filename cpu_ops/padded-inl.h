// The last elements of a run, padded to whole vectors.
#ifndef CPU_OPS_PADDED_INL_H_
#define CPU_OPS_PADDED_INL_H_

#include <cstddef>
#include <cstring>

#include "adam.h"
#include "elems-inl.h"

namespace sojax {
namespace {

// Copies of `count` elements from i on, followed by zeros.
template <class Grad, class Master, class Weight>
class Padded {
 public:
  static constexpr std::size_t kMaxElems = 32;

  SOJAX_INLINE Padded(const AdamBuffers& from, std::size_t i, std::size_t count)
      : from_(from), i_(i), count_(count) {
    Read(from.p, p_, Master::kElemBytes);
    if (from.p_low != nullptr) Read(from.p_low, p_low_, Master::kElemBytes);
    Read(from.mu, mu_, sizeof(float));
    Read(from.nu, nu_, sizeof(float));
    if (from.sum != nullptr) Read(from.sum, sum_, sizeof(float));
    Read(from.grad, grad_, sizeof(typename Grad::Elem));
  }

  // The copies, to be worked on.
  SOJAX_INLINE AdamBuffers buffers() {
    return {p_,
            from_.p_low == nullptr ? nullptr
                                   : reinterpret_cast<std::int16_t*>(p_low_),
            reinterpret_cast<float*>(mu_),
            reinterpret_cast<float*>(nu_),
            from_.sum == nullptr ? nullptr : reinterpret_cast<float*>(sum_),
            grad_,
            weight_,
            nullptr};
  }

  // Copies back what a step changes.
  SOJAX_INLINE void WriteBack() const {
    Write(p_, from_.p, Master::kElemBytes);
    if (from_.p_low != nullptr) Write(p_low_, from_.p_low, Master::kElemBytes);
    Write(mu_, from_.mu, sizeof(float));
    Write(nu_, from_.nu, sizeof(float));
    if constexpr (Weight::kWrites) {
      Write(weight_, from_.weight, sizeof(typename Weight::Elem));
    }
  }

 private:
  static constexpr std::size_t kMaxBytes = kMaxElems * sizeof(float);
  using Copy = unsigned char[kMaxBytes];

  SOJAX_INLINE void Read(const void* array, Copy& to, std::size_t elem_bytes) {
    std::memset(to, 0, kMaxBytes);
    std::memcpy(to, static_cast<const char*>(array) + i_ * elem_bytes,
                count_ * elem_bytes);
  }
  SOJAX_INLINE void Write(const Copy& copy, void* array,
                          std::size_t elem_bytes) const {
    std::memcpy(static_cast<char*>(array) + i_ * elem_bytes, copy,
                count_ * elem_bytes);
  }

  const AdamBuffers& from_;
  const std::size_t i_;
  const std::size_t count_;
  alignas(64) Copy p_, p_low_, mu_, nu_, sum_, grad_, weight_;
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_PADDED_INL_H_
