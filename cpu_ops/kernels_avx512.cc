#include "kernels-inl.h"
#include "vec_avx512.h"

namespace sojax {

constexpr KernelTable kAvx512Kernels = MakeKernelTable<Avx512>("avx512");

}  // namespace sojax
