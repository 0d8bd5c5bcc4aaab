// The formulas of AdamW: the one definition that a step, its record and its
// undoing share, since undoing is exact only if they round alike.
#ifndef CPU_OPS_FORMULAS_INL_H_
#define CPU_OPS_FORMULAS_INL_H_

#include <limits>

#include "adam.h"
#include "elems-inl.h"

namespace sojax {
namespace {

// The compiler keeps what V::Set gives in registers, out of the loops.
template <class V>
class Formulas {
 public:
  using F = typename V::F;

  explicit SOJAX_INLINE Formulas(const AdamParams& params) : c_(params) {}

  SOJAX_INLINE F ScaledGrad(F grad) const {
    return V::Mul(grad, V::Set(c_.grad_scale));
  }
  // What a gradient adds to mu and to nu.
  SOJAX_INLINE F MuGain(F g) const {
    return V::Mul(V::Set(c_.one_minus_b1), g);
  }
  SOJAX_INLINE F NuGain(F g) const {
    return V::Mul(V::Set(c_.one_minus_b2), V::Mul(g, g));
  }
  SOJAX_INLINE F NewMu(F mu, F gain) const {
    return V::Fma(mu, V::Set(c_.b1), gain);
  }
  SOJAX_INLINE F NewNu(F nu, F gain) const {
    return V::Fma(nu, V::Set(c_.b2), gain);
  }
  // How far the new moments move p, before decay.
  SOJAX_INLINE F Move(F new_mu, F new_nu) const {
    const F root = V::Sqrt(V::Add(new_nu, V::Set(c_.r)));
    const F below = V::Fma(root, V::Set(c_.k), V::Set(c_.eps));
    return V::Mul(V::Div(new_mu, below), V::Set(c_.s));
  }
  SOJAX_INLINE F NewP(F p, F move) const {
    return V::Add(p, V::Fma(p, V::Set(c_.d), move));
  }

 private:
  const AdamParams c_;
};

// Estimates of the state before a step. The same gains that the step added are
// subtracted, so that a zero is estimated exactly.
template <class V>
class Estimates {
 public:
  using F = typename V::F;

  explicit SOJAX_INLINE Estimates(const AdamParams& params)
      : per_b1_(Inverse(params.b1)),
        per_b2_(Inverse(params.b2)),
        per_decay_(Inverse(1.0 + static_cast<double>(params.d))) {}

  SOJAX_INLINE F Mu(F new_mu, F gain) const {
    return Before(new_mu, gain, per_b1_);
  }
  SOJAX_INLINE F Nu(F new_nu, F gain) const {
    return Before(new_nu, gain, per_b2_);
  }
  SOJAX_INLINE F P(F new_p, F move) const {
    return Before(new_p, move, per_decay_);
  }

 private:
  // Infinite if x is 0: then no estimate is any good, and all values escape.
  static SOJAX_INLINE float Inverse(double x) {
    return static_cast<float>(1.0 / x);
  }
  // Every NaN gives the same estimate: the step may have stored another.
  static SOJAX_INLINE F Before(F after, F gain, float factor) {
    return V::Below(V::Mul(V::Sub(after, gain), V::Set(factor)),
                    V::Set(std::numeric_limits<float>::max()));
  }

  const float per_b1_;
  const float per_b2_;
  const float per_decay_;
};

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_FORMULAS_INL_H_
