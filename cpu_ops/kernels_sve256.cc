#include "kernels-inl.h"
#include "vec_sve.h"

namespace sojax {

constexpr KernelTable kSve256Kernels = MakeKernelTable<Sve>("sve");

}  // namespace sojax
