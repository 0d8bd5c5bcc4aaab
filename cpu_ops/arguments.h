// Checks of the arrays that Python hands over.
#ifndef CPU_OPS_ARGUMENTS_H_
#define CPU_OPS_ARGUMENTS_H_

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "elem_types.h"
#include "extents.h"
#include "rollback.h"

namespace sojax {

// The element types that arrays may have.
struct Dtypes {
  const pybind11::dtype float32 = pybind11::dtype::of<float>();
  const pybind11::dtype float64 = pybind11::dtype::of<double>();
  const pybind11::dtype int16 = pybind11::dtype::of<std::int16_t>();
  const pybind11::dtype int64 = pybind11::dtype::of<std::int64_t>();
  const pybind11::dtype uint8 = pybind11::dtype::of<std::uint8_t>();
  const pybind11::dtype float16 = pybind11::dtype("float16");
  const pybind11::dtype bfloat16 = pybind11::dtype::from_args(
      pybind11::module_::import("ml_dtypes").attr("bfloat16"));

  // Looked up once: an import takes some tens of microseconds where kernels
  // have emptied the caches. Lives as long as the process.
  static const Dtypes& Get();
};

// Reads the arrays of one segment after the other, and those of a record, and
// keeps them alive for as long as it lives. It changes nothing, and throws a
// Python exception for an array that cannot be used, which names it. Call with
// the GIL.
class ArrayReader {
 public:
  // Goes on to the next segment. Returns it as a tuple of `num_fields`.
  pybind11::tuple NextSegment(const pybind11::handle& item,
                              std::size_t num_fields);

  // Each returns the elements of one field. The first that is read of a
  // segment gives the length that the others must have too.
  float* Floats(const pybind11::object& object, const char* field);
  const float* ConstFloats(const pybind11::object& object, const char* field);
  // May be None: nullptr.
  const float* OptionalFloats(const pybind11::object& object,
                              const char* field);
  // High halves are bfloat16, and then there are low ones.
  void* Master(const pybind11::object& object, const char* field,
               const pybind11::object& low, const char* low_field,
               std::int16_t** low_halves, MasterType* type);
  const void* Grad(const pybind11::object& object, const char* field,
                   GradType* type);
  // May be None.
  void* Weight(const pybind11::object& object, const char* field,
               WeightType* type);
  // May be None: nullptr. One double for each chunk of the segment.
  double* ChunkSums(const pybind11::object& object, const char* field);

  // Of any type that is plain bytes, and of any length.
  std::byte* Bytes(const pybind11::object& object, const char* field,
                   std::size_t* num_bytes);

  // Throws if an optional field is None all the same.
  void Require(const pybind11::object& object, const char* field) const;

  // The length of the segment.
  std::size_t num_elems() const { return num_elems_; }

  // Returns the place of the segment's layout in kLayouts.
  std::size_t LayoutIndex(const Layout& layout) const;

  // Reads a record of segments of these lengths.
  Record ReadRecord(const pybind11::tuple& fields, bool written,
                    const std::vector<std::size_t>& lengths);

  // Throws if an array that is written shares bytes with any other that was
  // read, of any segment. O(k log k).
  void CheckOverlap() const;

  // Returns the bytes of all arrays.
  std::vector<Extent> Extents() const;

  // Hands the arrays over: they live as long as the list.
  std::vector<pybind11::array> TakeArrays() { return std::move(arrays_); }

 private:
  // The bytes of one array, and how to name it.
  struct NamedExtent : Extent {
    std::size_t segment;
    const char* field;
  };

  static std::string Name(std::size_t segment, const char* field);
  std::string Name(const char* field) const;
  pybind11::array Flat(const pybind11::object& object, const char* field,
                       bool written);
  void CheckLength(const pybind11::array& array, const char* field);
  void CheckSize(const pybind11::array& array, const char* field,
                 std::size_t size, const std::string& reason) const;
  GradType TypeOf(const pybind11::array& array, const char* field) const;
  void CheckDtype(const pybind11::array& array, const char* field,
                  const pybind11::dtype& dtype) const;

  const Dtypes& dtypes_ = Dtypes::Get();
  std::size_t num_segments_ = 0;
  bool in_record_ = false;
  const char* first_field_ = nullptr;
  std::size_t num_elems_ = 0;
  std::vector<NamedExtent> extents_;
  std::vector<pybind11::array> arrays_;
};

}  // namespace sojax

#endif  // CPU_OPS_ARGUMENTS_H_
