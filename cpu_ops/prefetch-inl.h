// How far kernels read ahead.
#ifndef CPU_OPS_PREFETCH_INL_H_
#define CPU_OPS_PREFETCH_INL_H_

#include <cstddef>
#include <cstdint>

#include "adam.h"
#include "elems-inl.h"

namespace sojax {
namespace {

// Elements between two rounds of prefetches: one cache line of bfloat16, two
// of float.
constexpr std::size_t kBlockElems = 32;

// How far ahead of the loads to prefetch, into the second-level cache; what
// else was tried is in README.md.
constexpr std::size_t kPrefetchBytes = 2048;

constexpr std::size_t kCacheLineBytes = 64;

// Prefetches num_bytes that start kPrefetchBytes past `start`. Past the end of
// the array this does nothing, but a pointer there may not be formed.
SOJAX_INLINE void PrefetchBytes(std::uintptr_t start, std::size_t num_bytes) {
  for (std::size_t i = 0; i < num_bytes; i += kCacheLineBytes) {
    __builtin_prefetch(
        reinterpret_cast<const void*>(start + kPrefetchBytes + i), 0, 2);
  }
}

// Prefetches for the block of elements i..i + kBlockElems - 1.
template <std::size_t kElemBytes>
SOJAX_INLINE void PrefetchElems(const void* base, std::size_t i) {
  PrefetchBytes(reinterpret_cast<std::uintptr_t>(base) + i * kElemBytes,
                kBlockElems * kElemBytes);
}

template <class Grad>
SOJAX_INLINE void PrefetchGrad(const float* sum, const void* grad,
                               std::size_t i) {
  PrefetchElems<sizeof(typename Grad::Elem)>(grad, i);
  if (sum != nullptr) PrefetchElems<sizeof(float)>(sum, i);
}

template <class Grad, class Master>
SOJAX_INLINE void PrefetchStep(const AdamBuffers& b, std::size_t i) {
  PrefetchElems<Master::kElemBytes>(b.p, i);
  if constexpr (Master::kElemBytes == 2) PrefetchElems<2>(b.p_low, i);
  PrefetchElems<sizeof(float)>(b.mu, i);
  PrefetchElems<sizeof(float)>(b.nu, i);
  PrefetchGrad<Grad>(b.sum, b.grad, i);
}

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_PREFETCH_INL_H_
