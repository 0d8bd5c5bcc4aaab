// All the instances of the kernels for one vector trait. Include this from one
// kernels_<isa>.cc.
#ifndef CPU_OPS_KERNELS_INL_H_
#define CPU_OPS_KERNELS_INL_H_

#include "accumulate-inl.h"
#include "adam-inl.h"
#include "kernels.h"

namespace sojax {
namespace {

// Rows follow GradType, columns WeightType.
template <class V>
constexpr KernelTable MakeKernelTable(const char* isa) {
  return {isa,
          V::kVectorBits,
          {{AdamStep<V, GradFloat32, WeightNone>::Run,
            AdamStep<V, GradFloat32, WeightFloat32>::Run,
            AdamStep<V, GradFloat32, WeightBfloat16>::Run,
            AdamStep<V, GradFloat32, WeightFloat16>::Run},
           {AdamStep<V, GradBfloat16, WeightNone>::Run,
            AdamStep<V, GradBfloat16, WeightFloat32>::Run,
            AdamStep<V, GradBfloat16, WeightBfloat16>::Run,
            AdamStep<V, GradBfloat16, WeightFloat16>::Run},
           {AdamStep<V, GradFloat16, WeightNone>::Run,
            AdamStep<V, GradFloat16, WeightFloat32>::Run,
            AdamStep<V, GradFloat16, WeightBfloat16>::Run,
            AdamStep<V, GradFloat16, WeightFloat16>::Run}},
          {Accumulation<V, GradFloat32, false>::Run,
           Accumulation<V, GradBfloat16, false>::Run,
           Accumulation<V, GradFloat16, false>::Run},
          {Accumulation<V, GradFloat32, true>::Run,
           Accumulation<V, GradBfloat16, true>::Run,
           Accumulation<V, GradFloat16, true>::Run}};
}

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_KERNELS_INL_H_
