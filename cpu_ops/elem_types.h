// What the elements of an array can be, where a kernel has a choice.
#ifndef CPU_OPS_ELEM_TYPES_H_
#define CPU_OPS_ELEM_TYPES_H_

#include <cstddef>

namespace sojax {

// What is stored in a gradient, and in the working weights written.
enum class GradType { kFloat32, kBfloat16, kFloat16 };
enum class WeightType { kNone, kFloat32, kBfloat16, kFloat16 };
inline constexpr std::size_t kNumGradTypes = 3;
inline constexpr std::size_t kNumWeightTypes = 4;

}  // namespace sojax

#endif  // CPU_OPS_ELEM_TYPES_H_
