#include "kernels-inl.h"
#include "vec_avx2.h"

namespace sojax {

constexpr KernelTable kAvx2Kernels = MakeKernelTable<Avx2>("avx2");

}  // namespace sojax
