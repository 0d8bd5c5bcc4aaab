// The codes of records (record.h), over a vector trait.
#ifndef CPU_OPS_CODES_INL_H_
#define CPU_OPS_CODES_INL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "elems-inl.h"
#include "record.h"

namespace sojax {
namespace {

// Codes are read and written for two vectors at a time, so that those of 4
// bits fill whole bytes with every trait.
template <class V>
constexpr std::size_t kPairElems = 2 * V::kLanes;

// How the codes of one array are stored. `at` is the place of the group's codes
// of the array; a pair starts at element i of the group.
struct ByteCodes {
  static constexpr std::size_t kBits = 8;
  static constexpr int kLimit = 127;
  template <class V, bool kStream>
  static SOJAX_INLINE void Store(std::uint8_t* at, std::size_t i,
                                 typename V::Ints a, typename V::Ints b) {
    auto* to = reinterpret_cast<std::int8_t*>(at + i);
    if constexpr (kStream) {
      V::StreamBytes(to, a, b);
    } else {
      V::StoreBytes(to, a, b);
    }
  }
  template <class V, std::size_t kHalf>
  static SOJAX_INLINE typename V::Ints Load(const std::uint8_t* at,
                                            std::size_t i) {
    return V::LoadBytes(
        reinterpret_cast<const std::int8_t*>(at + i + kHalf * V::kLanes));
  }
};

struct NibbleCodes {
  static constexpr std::size_t kBits = 4;
  static constexpr int kLimit = 7;
  template <class V, bool kStream>
  static SOJAX_INLINE void Store(std::uint8_t* at, std::size_t i,
                                 typename V::Ints a, typename V::Ints b) {
    if constexpr (kStream) {
      V::StreamNibbles(at + i / 2, a, b);
    } else {
      V::StoreNibbles(at + i / 2, a, b);
    }
  }
  template <class V, std::size_t kHalf>
  static SOJAX_INLINE typename V::Ints Load(const std::uint8_t* at,
                                            std::size_t i) {
    return V::template LoadNibbles<kHalf>(at + i / 2);
  }
};

// The arrays of a form, and where their codes are in a group.
template <RecordForm kForm>
struct FormOf {
  using Mu = ByteCodes;
  using Nu = ByteCodes;
  using P = ByteCodes;
};
template <>
struct FormOf<RecordForm::kTwoBytes> {
  using Mu = ByteCodes;
  using Nu = NibbleCodes;
  using P = NibbleCodes;
};

template <RecordForm kForm>
struct GroupLayout : FormOf<kForm> {
  using typename FormOf<kForm>::Mu;
  using typename FormOf<kForm>::Nu;
  using typename FormOf<kForm>::P;
  static constexpr std::size_t kNuStart = kGroupElems * Mu::kBits / 8;
  static constexpr std::size_t kPStart = kNuStart + kGroupElems * Nu::kBits / 8;
  static constexpr std::size_t kBytes = kPStart + kGroupElems * P::kBits / 8;
  static_assert(kBytes == CodesBytes(kForm, kGroupElems));
};

// The values and codes of the elements of one vector, one array after the
// other (mu, nu, p), for the rare vector that has escapes.
struct SlowVector {
  static constexpr std::size_t kMaxLanes = 16;
  alignas(64) float values[3][kMaxLanes];
  alignas(64) std::int32_t codes[3][kMaxLanes];

  template <class V>
  SOJAX_INLINE void SetCodes(std::size_t array, typename V::Ints x) {
    static_assert(V::kLanes <= kMaxLanes);
    alignas(64) float bits[kMaxLanes];
    V::Store(bits, V::FromBits(x));
    std::memcpy(codes[array], bits, V::kLanes * sizeof(*bits));
  }
  template <class V>
  SOJAX_INLINE typename V::Ints Codes(std::size_t array) const {
    alignas(64) float bits[kMaxLanes];
    std::memcpy(bits, codes[array], V::kLanes * sizeof(*bits));
    return V::Bits(V::Load(bits));
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_CODES_INL_H_
