// All the instances of the kernels for one vector trait. Include this from one
// kernels_<isa>.cc.
#ifndef CPU_OPS_KERNELS_INL_H_
#define CPU_OPS_KERNELS_INL_H_

#include <cstddef>
#include <utility>

#include "accumulate-inl.h"
#include "adam-inl.h"
#include "kernels.h"
#include "record-inl.h"
#include "undo-inl.h"

namespace sojax {
namespace {

template <class V, std::size_t kLayout>
struct LayoutInstances {
  static constexpr Layout kTypes = kLayouts[kLayout];
  using Grad = typename GradOf<kTypes.grad>::Type;
  using Master = typename MasterOf<kTypes.master>::Type;
  using Weight = typename WeightOf<kTypes.weight>::Type;

  template <RecordForm kForm>
  using Record = RecordStep<V, Grad, Master, Weight, kForm>;
  template <RecordForm kForm>
  using Undoing = TakeBack<V, Grad, Master, WeightNone, kForm, false>;
  template <RecordForm kForm>
  using Redoing = TakeBack<V, Grad, Master, Weight, kForm, true>;

  // In the order of RecordForm.
  static constexpr LayoutKernels kKernels = {
      AdamStep<V, Grad, Master, Weight>::Run,
      {Record<RecordForm::kTwoBytes>::Run,
       Record<RecordForm::kThreeBytes>::Run},
      {Undoing<RecordForm::kTwoBytes>::Undo,
       Undoing<RecordForm::kThreeBytes>::Undo},
      {Redoing<RecordForm::kTwoBytes>::Redo,
       Redoing<RecordForm::kThreeBytes>::Redo}};
};

template <class V, std::size_t... kLayout>
constexpr KernelTable MakeKernelTable(const char* isa,
                                      std::index_sequence<kLayout...>) {
  // Others follow the order of GradType and WeightType.
  return {
      isa,
      V::kVectorBits,
      {LayoutInstances<V, kLayout>::kKernels...},
      {Accumulation<V, GradFloat32, false>::Run,
       Accumulation<V, GradBfloat16, false>::Run,
       Accumulation<V, GradFloat16, false>::Run},
      {Accumulation<V, GradFloat32, true>::Run,
       Accumulation<V, GradBfloat16, true>::Run,
       Accumulation<V, GradFloat16, true>::Run},
      {Squares<V, GradFloat32>::Run, Squares<V, GradBfloat16>::Run,
       Squares<V, GradFloat16>::Run},
      {nullptr, Narrowing<V, WeightFloat32>::Run,
       Narrowing<V, WeightBfloat16>::Run, Narrowing<V, WeightFloat16>::Run}};
}

template <class V>
constexpr KernelTable MakeKernelTable(const char* isa) {
  return MakeKernelTable<V>(isa, std::make_index_sequence<kNumLayouts>());
}

}  // namespace
}  // namespace sojax

#endif  // CPU_OPS_KERNELS_INL_H_
