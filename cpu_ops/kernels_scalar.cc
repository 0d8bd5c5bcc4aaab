#include "kernels-inl.h"
#include "vec_scalar.h"

namespace sojax {

constexpr KernelTable kScalarKernels = MakeKernelTable<Scalar>("scalar");

}  // namespace sojax
