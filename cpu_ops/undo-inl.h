// The body of the kernels that take a recorded step back, and take it again
// with another grad_scale, written once over a vector trait, the types of its
// arrays (elems-inl.h) and the form of the record.
#ifndef CPU_OPS_UNDO_INL_H_
#define CPU_OPS_UNDO_INL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "adam-inl.h"
#include "codes-inl.h"
#include "formulas-inl.h"
#include "fp_mode.h"
#include "padded-inl.h"
#include "prefetch-inl.h"

namespace sojax {
namespace {

// kSteps: whether the step is taken again.
template <class V, class Grad, class Master, class Weight, RecordForm kForm,
          bool kSteps>
class TakeBack {
 public:
  // An UndoFn.
  static std::size_t Undo(const AdamParams& params, const AdamBuffers& buffers,
                          const std::uint8_t* codes, Escapes escapes,
                          std::size_t n) {
    static_assert(!kSteps && !Weight::kWrites);
    const ScopedDefaultFpMode fp_mode;
    return Run(params, params, buffers, codes, escapes, n);
  }

  // A RedoFn.
  static std::size_t Redo(const AdamParams& params, float new_grad_scale,
                          const AdamBuffers& buffers, const std::uint8_t* codes,
                          Escapes escapes, std::size_t n) {
    static_assert(kSteps);
    const ScopedDefaultFpMode fp_mode;
    AdamParams new_params = params;
    new_params.grad_scale = new_grad_scale;
    return Run(params, new_params, buffers, codes, escapes, n);
  }

 private:
  using F = typename V::F;
  using Ints = typename V::Ints;
  using Group = GroupLayout<kForm>;
  static constexpr std::size_t kPair = kPairElems<V>;

  struct Pass {
    SOJAX_INLINE Pass(const AdamParams& params, const AdamParams& new_params,
                      const std::uint8_t* from)
        : taken(params), estimates(params), again(new_params), codes(from) {}
    const Formulas<V> taken;
    const Estimates<V> estimates;
    const Formulas<V> again;
    const std::uint8_t* const codes;
  };

  // The escapes that are left, and how many have been asked for.
  struct Cursor {
    const Escapes escapes;
    std::size_t num_taken = 0;
  };

  // Not inlined: see ScopedDefaultFpMode.
  static __attribute__((noinline)) std::size_t Run(const AdamParams& params,
                                                   const AdamParams& new_params,
                                                   const AdamBuffers& buffers,
                                                   const std::uint8_t* codes,
                                                   Escapes escapes,
                                                   std::size_t n) {
    const Pass pass(params, new_params, codes);
    const AdamBuffers b = buffers;  // a copy stays in registers
    Cursor cursor{escapes};
    if constexpr (kStreamsWeights<V, Weight>) {
      if (ElemsToAlignment<V, Weight>(b.weight) == 0) {
        RunRange<true>(pass, b, cursor, n);
        V::Fence();
        return cursor.num_taken;
      }
    }
    RunRange<false>(pass, b, cursor, n);
    return cursor.num_taken;
  }

  template <bool kStream>
  static SOJAX_INLINE void RunRange(const Pass& pass, const AdamBuffers& b,
                                    Cursor& cursor, std::size_t n) {
    std::size_t i = 0;
    for (; i + kBlockElems <= n; i += kBlockElems) {
      PrefetchStep<Grad, Master>(b, i);
      PrefetchBytes(reinterpret_cast<std::uintptr_t>(pass.codes) +
                        i * BytesPerElem(kForm),
                    kBlockElems * BytesPerElem(kForm));
      for (std::size_t j = 0; j < kBlockElems; j += kPair) {
        RunPair<kStream>(pass, b, cursor, i + j, i + j);
      }
    }
    for (; i + kPair <= n; i += kPair) {
      RunPair<kStream>(pass, b, cursor, i, i);
    }
    if (i < n) {
      // The codes past the end are 0, so that nothing escapes there.
      Padded<Grad, Master, Weight> padded(b, i, n - i);
      RunPair<false>(pass, padded.buffers(), cursor, 0, i);
      padded.WriteBack();
    }
  }

  // Goes through kPair elements from i on; their codes start at code_i.
  template <bool kStream>
  static SOJAX_INLINE void RunPair(const Pass& pass, const AdamBuffers& b,
                                   Cursor& cursor, std::size_t i,
                                   std::size_t code_i) {
    RunVector<kStream, 0>(pass, b, cursor, i, code_i);
    RunVector<kStream, 1>(pass, b, cursor, i + V::kLanes, code_i);
  }

  template <bool kStream, std::size_t kHalf>
  static SOJAX_INLINE void RunVector(const Pass& pass, const AdamBuffers& b,
                                     Cursor& cursor, std::size_t i,
                                     std::size_t code_i) {
    const F grad = LoadGrad<V, Grad>(b.sum, b.grad, i);
    const F g = pass.taken.ScaledGrad(grad);
    const F new_mu = V::Load(b.mu + i);
    const F new_nu = V::Load(b.nu + i);
    const F new_p = Master::template Load<V>(b, i);
    const F move = pass.taken.Move(new_mu, new_nu);

    const std::uint8_t* group =
        pass.codes + code_i / kGroupElems * Group::kBytes;
    const std::size_t at = code_i % kGroupElems;
    const Ints mu_code = Group::Mu::template Load<V, kHalf>(group, at);
    const Ints nu_code =
        Group::Nu::template Load<V, kHalf>(group + Group::kNuStart, at);
    const Ints p_code =
        Group::P::template Load<V, kHalf>(group + Group::kPStart, at);
    F mu = Sum(pass.estimates.Mu(new_mu, pass.taken.MuGain(g)), mu_code);
    F nu = Sum(pass.estimates.Nu(new_nu, pass.taken.NuGain(g)), nu_code);
    F p = Sum(pass.estimates.P(new_p, move), p_code);
    const auto escaping =
        V::Or(V::Or(V::IsEqual(mu_code, -Group::Mu::kLimit - 1),
                    V::IsEqual(nu_code, -Group::Nu::kLimit - 1)),
              V::IsEqual(p_code, -Group::P::kLimit - 1));
    if (__builtin_expect(V::Any(escaping), 0)) {
      SlowVector slow;
      V::Store(slow.values[0], mu);
      V::Store(slow.values[1], nu);
      V::Store(slow.values[2], p);
      slow.SetCodes<V>(0, mu_code);
      slow.SetCodes<V>(1, nu_code);
      slow.SetCodes<V>(2, p_code);
      cursor.num_taken = TakeEscapes(slow, cursor.escapes, cursor.num_taken);
      mu = V::Load(slow.values[0]);
      nu = V::Load(slow.values[1]);
      p = V::Load(slow.values[2]);
    }
    Write<kStream>(pass, b, i, grad, mu, nu, p);
  }

  static SOJAX_INLINE F Sum(F estimate, Ints code) {
    return V::FromBits(V::AddInts(V::Bits(estimate), code));
  }

  // Writes the state before the step, or after it is taken again.
  template <bool kStream>
  static SOJAX_INLINE void Write(const Pass& pass, const AdamBuffers& b,
                                 std::size_t i, F grad, F mu, F nu, F p) {
    if constexpr (kSteps) {
      const F g = pass.again.ScaledGrad(grad);
      const F new_mu = pass.again.NewMu(mu, pass.again.MuGain(g));
      const F new_nu = pass.again.NewNu(nu, pass.again.NuGain(g));
      const F new_p = pass.again.NewP(p, pass.again.Move(new_mu, new_nu));
      V::Store(b.mu + i, new_mu);
      V::Store(b.nu + i, new_nu);
      Master::template Store<V>(b, i, new_p);
      StoreWeight<V, Weight, kStream>(b, i, new_p);
    } else {
      V::Store(b.mu + i, mu);
      V::Store(b.nu + i, nu);
      Master::template Restore<V>(b, i, p);
    }
  }

  // Replaces the values whose codes say so. Returns the new num_taken.
  static __attribute__((noinline)) std::size_t TakeEscapes(
      SlowVector& slow, Escapes escapes, std::size_t num_taken) {
    constexpr int kLimits[] = {Group::Mu::kLimit, Group::Nu::kLimit,
                               Group::P::kLimit};
    for (std::size_t lane = 0; lane < V::kLanes; ++lane) {
      for (std::size_t array = 0; array < 3; ++array) {
        if (slow.codes[array][lane] != -kLimits[array] - 1) continue;
        if (num_taken < escapes.count) {
          std::memcpy(&slow.values[array][lane], escapes.floats + num_taken,
                      sizeof(float));
        }
        ++num_taken;
      }
    }
    return num_taken;
  }
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_UNDO_INL_H_
