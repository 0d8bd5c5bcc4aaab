#include "kernels-inl.h"
#include "vec_neon.h"

namespace sojax {

constexpr KernelTable kNeonKernels = MakeKernelTable<Neon>("neon");

}  // namespace sojax
