#include "kernels-inl.h"
#include "vec_sve.h"

namespace sojax {

constexpr KernelTable kSve128Kernels = MakeKernelTable<Sve>("sve");

}  // namespace sojax
