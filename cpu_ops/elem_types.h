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

// How master weights are stored. Split, each float is a bfloat16, the working
// weight, and a 16-bit remainder: bits = (high << 16) + low (the idea is
// Split-SGD-BF16's, arXiv 2005.04680).
enum class MasterType { kFloat32, kSplit };

// The types of all arrays of a step.
struct Layout {
  GradType grad;
  MasterType master;
  WeightType weight;

  constexpr bool operator==(const Layout& other) const {
    return grad == other.grad && master == other.master &&
           weight == other.weight;
  }
};

// The layouts that a plan can ask for: gradients and weights cross the link in
// float32 or in one working type, and split masters send their high halves.
// Tables of kernels have one entry for each, in this order.
inline constexpr Layout kLayouts[] = {
    {GradType::kFloat32, MasterType::kFloat32, WeightType::kNone},
    {GradType::kFloat32, MasterType::kFloat32, WeightType::kFloat32},
    {GradType::kFloat32, MasterType::kFloat32, WeightType::kBfloat16},
    {GradType::kFloat32, MasterType::kFloat32, WeightType::kFloat16},
    {GradType::kBfloat16, MasterType::kFloat32, WeightType::kNone},
    {GradType::kBfloat16, MasterType::kFloat32, WeightType::kFloat32},
    {GradType::kBfloat16, MasterType::kFloat32, WeightType::kBfloat16},
    {GradType::kFloat16, MasterType::kFloat32, WeightType::kNone},
    {GradType::kFloat16, MasterType::kFloat32, WeightType::kFloat32},
    {GradType::kFloat16, MasterType::kFloat32, WeightType::kFloat16},
    {GradType::kFloat32, MasterType::kSplit, WeightType::kNone},
    {GradType::kBfloat16, MasterType::kSplit, WeightType::kNone},
};
inline constexpr std::size_t kNumLayouts = sizeof(kLayouts) / sizeof(Layout);

// Returns the place of a layout in kLayouts; kNumLayouts if it has none.
constexpr std::size_t FindLayout(const Layout& layout) {
  std::size_t i = 0;
  while (i < kNumLayouts && !(kLayouts[i] == layout)) ++i;
  return i;
}

}  // namespace sojax

#endif  // CPU_OPS_ELEM_TYPES_H_
