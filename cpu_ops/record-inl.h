// The body of the step that records itself, written once over a vector trait,
// the types of its arrays (elems-inl.h) and the form of the record.
#ifndef CPU_OPS_RECORD_INL_H_
#define CPU_OPS_RECORD_INL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "accumulate.h"
#include "adam-inl.h"
#include "codes-inl.h"
#include "formulas-inl.h"
#include "fp_mode.h"
#include "padded-inl.h"
#include "prefetch-inl.h"
#include "squares-inl.h"

namespace sojax {
namespace {

template <class V, class Grad, class Master, class Weight, RecordForm kForm>
class RecordStep {
 public:
  // A RecordFn.
  static std::size_t Run(const AdamParams& params, const AdamBuffers& buffers,
                         std::uint8_t* codes, float* escapes, std::size_t n) {
    const ScopedDefaultFpMode fp_mode;
    const float* end =
        buffers.sumsq != nullptr
            ? RecordWithSquares(params, buffers, codes, escapes, n)
            : Record(params, buffers, codes, escapes, n);
    return static_cast<std::size_t>(end - escapes);
  }

 private:
  using F = typename V::F;
  using Ints = typename V::Ints;
  using Group = GroupLayout<kForm>;
  static constexpr std::size_t kPair = kPairElems<V>;
  static_assert(kBlockElems % kPair == 0 && kGroupElems % kPair == 0);
  static_assert(kPair <= Padded<Grad, Master, Weight>::kMaxElems);

  struct Pass {
    SOJAX_INLINE Pass(const AdamParams& params, std::uint8_t* to)
        : formulas(params), estimates(params), codes(to) {}
    const Formulas<V> formulas;
    const Estimates<V> estimates;
    std::uint8_t* const codes;
  };

  // Neither is inlined: see ScopedDefaultFpMode. Both return the end of the
  // escapes.
  static __attribute__((noinline)) float* Record(const AdamParams& params,
                                                 const AdamBuffers& buffers,
                                                 std::uint8_t* codes,
                                                 float* escapes,
                                                 std::size_t n) {
    const Pass pass(params, codes);
    const AdamBuffers b = buffers;  // a copy stays in registers
    ClearLastGroup(codes, n);
    NoSquares none;
    escapes = RecordRange(pass, b, none, 0, n, escapes);
    if constexpr (V::kStreams) V::Fence();
    return escapes;
  }

  static __attribute__((noinline)) float* RecordWithSquares(
      const AdamParams& params, const AdamBuffers& buffers, std::uint8_t* codes,
      float* escapes, std::size_t n) {
    const Pass pass(params, codes);
    const AdamBuffers b = buffers;
    ClearLastGroup(codes, n);
    for (std::size_t chunk = 0; chunk < NumChunks(n); ++chunk) {
      const std::size_t begin = chunk * kChunkElems;
      const std::size_t end = std::min(n - begin, kChunkElems) + begin;
      ChunkSquares<V> squares;
      escapes = RecordRange(pass, b, squares, begin, end, escapes);
      squares.Store(b.sumsq + chunk);
    }
    if constexpr (V::kStreams) V::Fence();
    return escapes;
  }

  static SOJAX_INLINE void ClearLastGroup(std::uint8_t* codes, std::size_t n) {
    if (n % kGroupElems != 0) {
      std::memset(codes + n / kGroupElems * Group::kBytes, 0, Group::kBytes);
    }
  }

  template <class Squares>
  static SOJAX_INLINE float* RecordRange(const Pass& pass, const AdamBuffers& b,
                                         Squares& squares, std::size_t i,
                                         std::size_t end, float* escapes) {
    if constexpr (kStreamsWeights<V, Weight>) {
      if (ElemsToAlignment<V, Weight>(b.weight) == 0) {
        return RecordRange<true>(pass, b, squares, i, end, escapes);
      }
    }
    return RecordRange<false>(pass, b, squares, i, end, escapes);
  }

  // Takes and records the step of the elements i..end-1; i starts a group.
  template <bool kStream, class Squares>
  static SOJAX_INLINE float* RecordRange(const Pass& pass, const AdamBuffers& b,
                                         Squares& squares, std::size_t i,
                                         std::size_t end, float* escapes) {
    for (; i + kBlockElems <= end; i += kBlockElems) {
      PrefetchStep<Grad, Master>(b, i);
      for (std::size_t j = 0; j < kBlockElems / kPair; ++j) {
        escapes = RecordPair<kStream>(pass, b, squares, 2 * j, i + j * kPair,
                                      escapes);
      }
    }
    std::size_t j = 0;
    for (; i + kPair <= end; i += kPair, j += 2) {
      escapes = RecordPair<kStream>(pass, b, squares, j, i, escapes);
    }
    if (i < end) {
      Padded<Grad, Master, Weight> padded(b, i, end - i);
      escapes =
          RecordPart(pass, padded.buffers(), squares, j, i, end - i, escapes);
      padded.WriteBack();
    }
    return escapes;
  }

  // Takes the step of kPair elements from i on; j counts vectors.
  template <bool kStream, class Squares>
  static SOJAX_INLINE float* RecordPair(const Pass& pass, const AdamBuffers& b,
                                        Squares& squares, std::size_t j,
                                        std::size_t i, float* escapes) {
    Ints mu_a, nu_a, p_a, mu_b, nu_b, p_b;
    escapes =
        RecordVector<kStream>(pass, b, squares, j, i, mu_a, nu_a, p_a, escapes);
    escapes = RecordVector<kStream>(pass, b, squares, j + 1, i + V::kLanes,
                                    mu_b, nu_b, p_b, escapes);
    std::uint8_t* group = pass.codes + i / kGroupElems * Group::kBytes;
    const std::size_t at = i % kGroupElems;
    Group::Mu::template Store<V, V::kStreams>(group, at, mu_a, mu_b);
    Group::Nu::template Store<V, V::kStreams>(group + Group::kNuStart, at, nu_a,
                                              nu_b);
    Group::P::template Store<V, V::kStreams>(group + Group::kPStart, at, p_a,
                                             p_b);
    return escapes;
  }

  // The same for `count` elements, fewer than kPair: `b` holds kPair of them
  // from element 0 on, i is where the codes belong.
  template <class Squares>
  static SOJAX_INLINE float* RecordPart(const Pass& pass, const AdamBuffers& b,
                                        Squares& squares, std::size_t j,
                                        std::size_t i, std::size_t count,
                                        float* escapes) {
    const std::size_t count_a = std::min(count, V::kLanes);
    Ints mu_a, nu_a, p_a, mu_b, nu_b, p_b;
    escapes = RecordVector<false>(pass, b, squares, j, 0, mu_a, nu_a, p_a,
                                  escapes, count_a);
    escapes = RecordVector<false>(pass, b, squares, j + 1, V::kLanes, mu_b,
                                  nu_b, p_b, escapes, count - count_a);
    std::uint8_t* group = pass.codes + i / kGroupElems * Group::kBytes;
    const std::size_t at = i % kGroupElems;
    Group::Mu::template Store<V, false>(group, at, mu_a, mu_b);
    Group::Nu::template Store<V, false>(group + Group::kNuStart, at, nu_a,
                                        nu_b);
    Group::P::template Store<V, false>(group + Group::kPStart, at, p_a, p_b);
    return escapes;
  }

  // Takes the step of V::kLanes elements from i on and gives their codes, 0
  // for those past the count if there is one. Returns the end of the escapes.
  template <bool kStream, class Squares, class... Count>
  static SOJAX_INLINE float* RecordVector(const Pass& pass,
                                          const AdamBuffers& b,
                                          Squares& squares, std::size_t j,
                                          std::size_t i, Ints& mu_code,
                                          Ints& nu_code, Ints& p_code,
                                          float* escapes, Count... count) {
    const Formulas<V>& formulas = pass.formulas;
    const F grad = LoadGrad<V, Grad>(b.sum, b.grad, i);
    squares.Add(j, grad);
    const F g = formulas.ScaledGrad(grad);
    const F mu_gain = formulas.MuGain(g);
    const F nu_gain = formulas.NuGain(g);
    const F mu = V::Load(b.mu + i);
    const F nu = V::Load(b.nu + i);
    const F p = Master::template Load<V>(b, i);
    const F new_mu = formulas.NewMu(mu, mu_gain);
    const F new_nu = formulas.NewNu(nu, nu_gain);
    const F move = formulas.Move(new_mu, new_nu);
    const F new_p = formulas.NewP(p, move);
    V::Store(b.mu + i, new_mu);
    V::Store(b.nu + i, new_nu);
    Master::template Store<V>(b, i, new_p);
    StoreWeight<V, Weight, kStream>(b, i, new_p);

    mu_code = Difference(mu, pass.estimates.Mu(new_mu, mu_gain));
    nu_code = Difference(nu, pass.estimates.Nu(new_nu, nu_gain));
    p_code = Difference(p, pass.estimates.P(new_p, move));
    const auto escaping = V::Or(V::Or(V::IsBeyond(mu_code, Group::Mu::kLimit),
                                      V::IsBeyond(nu_code, Group::Nu::kLimit)),
                                V::IsBeyond(p_code, Group::P::kLimit));
    if (sizeof...(Count) != 0 || __builtin_expect(V::Any(escaping), 0)) {
      SlowVector slow;
      V::Store(slow.values[0], mu);
      V::Store(slow.values[1], nu);
      V::Store(slow.values[2], p);
      slow.SetCodes<V>(0, mu_code);
      slow.SetCodes<V>(1, nu_code);
      slow.SetCodes<V>(2, p_code);
      escapes = Escape(slow, escapes, count...);
      mu_code = slow.Codes<V>(0);
      nu_code = slow.Codes<V>(1);
      p_code = slow.Codes<V>(2);
    }
    return escapes;
  }

  static SOJAX_INLINE Ints Difference(F value, F estimate) {
    return V::SubInts(V::Bits(value), V::Bits(estimate));
  }

  // Marks the codes that do not fit and appends their values to the escapes;
  // clears the codes past the count.
  static __attribute__((noinline)) float* Escape(
      SlowVector& slow, float* escapes, std::size_t count = V::kLanes) {
    constexpr int kLimits[] = {Group::Mu::kLimit, Group::Nu::kLimit,
                               Group::P::kLimit};
    for (std::size_t lane = 0; lane < V::kLanes; ++lane) {
      for (std::size_t array = 0; array < 3; ++array) {
        std::int32_t& code = slow.codes[array][lane];
        const int limit = kLimits[array];
        if (lane >= count) {
          code = 0;
        } else if (code < -limit || code > limit) {
          code = -limit - 1;
          std::memcpy(escapes++, &slow.values[array][lane], sizeof(float));
        }
      }
    }
    return escapes;
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_RECORD_INL_H_
