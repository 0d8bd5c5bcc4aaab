#include "arguments.h"

#include <algorithm>

#include "accumulate.h"

namespace py = pybind11;

namespace sojax {
namespace {

std::string Text(const py::handle& object) {
  return py::cast<std::string>(py::str(object));
}

}  // namespace

py::tuple ArrayReader::NextSegment(const py::handle& item,
                                   std::size_t num_fields) {
  const auto fields = item.cast<py::tuple>();
  if (fields.size() != num_fields) {
    throw py::value_error("segments[" + std::to_string(num_segments_) +
                          "] has " + std::to_string(fields.size()) +
                          " fields, not " + std::to_string(num_fields));
  }
  ++num_segments_;
  first_field_ = nullptr;
  return fields;
}

float* ArrayReader::Floats(const py::object& object, const char* field) {
  py::array array = Flat(object, field, true);
  if (first_field_ == nullptr) {
    first_field_ = field;
    num_elems_ = static_cast<std::size_t>(array.size());
  }
  CheckLength(array, field);
  CheckDtype(array, field, float32_);
  return static_cast<float*>(array.mutable_data());
}

const void* ArrayReader::Grad(const py::object& object, const char* field,
                              GradType* type) {
  const py::array array = Flat(object, field, false);
  CheckLength(array, field);
  *type = TypeOf(array, field);
  return array.data();
}

void* ArrayReader::Weight(const py::object& object, const char* field,
                          WeightType* type) {
  *type = WeightType::kNone;
  if (object.is_none()) return nullptr;
  py::array array = Flat(object, field, true);
  CheckLength(array, field);
  switch (TypeOf(array, field)) {
    case GradType::kFloat32:
      *type = WeightType::kFloat32;
      break;
    case GradType::kBfloat16:
      *type = WeightType::kBfloat16;
      break;
    case GradType::kFloat16:
      *type = WeightType::kFloat16;
      break;
  }
  return array.mutable_data();
}

double* ArrayReader::ChunkSums(const py::object& object, const char* field) {
  if (object.is_none()) return nullptr;
  py::array array = Flat(object, field, true);
  const std::size_t num_chunks = NumChunks(num_elems_);
  if (static_cast<std::size_t>(array.size()) != num_chunks) {
    throw py::value_error(Name(field) + " has " + std::to_string(array.size()) +
                          " elements; give " + std::to_string(num_chunks) +
                          ", one for each " + std::to_string(kChunkElems) +
                          " of the " + std::to_string(num_elems_) +
                          " elements of " + first_field_);
  }
  CheckDtype(array, field, float64_);
  return static_cast<double*>(array.mutable_data());
}

// In order of their starts, an extent overlaps an earlier one exactly if it
// overlaps the one that reaches furthest.
void ArrayReader::CheckOverlap() const {
  std::vector<Extent> extents = extents_;
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.start < b.start; });
  const Extent* furthest = nullptr;
  const Extent* furthest_written = nullptr;
  for (const Extent& extent : extents) {
    const Extent* other = extent.written ? furthest : furthest_written;
    if (other != nullptr && extent.start < other->end) {
      throw py::value_error(
          Name(other->segment, other->field) + " and " +
          Name(extent.segment, extent.field) + " overlap by " +
          std::to_string(std::min(other->end, extent.end) - extent.start) +
          " bytes; an array that is written may share none with another");
    }
    if (furthest == nullptr || extent.end > furthest->end) furthest = &extent;
    if (extent.written &&
        (furthest_written == nullptr || extent.end > furthest_written->end)) {
      furthest_written = &extent;
    }
  }
}

std::string ArrayReader::Name(std::size_t segment, const char* field) {
  return "segments[" + std::to_string(segment) + "]." + field;
}

std::string ArrayReader::Name(const char* field) const {
  return Name(num_segments_ - 1, field);
}

// Checks all but the element type and the length.
py::array ArrayReader::Flat(const py::object& object, const char* field,
                            bool written) {
  const std::string name = Name(field);
  if (!py::isinstance<py::array>(object)) {
    throw py::type_error(name + " is a " +
                         Text(py::type::of(object).attr("__name__")) +
                         "; give a numpy.ndarray");
  }
  auto array = py::reinterpret_borrow<py::array>(object);
  if (array.ndim() != 1) {
    throw py::value_error(name + " has " + std::to_string(array.ndim()) +
                          " dimensions; give a flat view of it: reshape(-1)");
  }
  if ((array.flags() & py::array::c_style) == 0) {
    throw py::value_error(name + " has a stride of " +
                          std::to_string(array.strides(0)) +
                          " bytes; give a contiguous array");
  }
  if (written && !array.writeable()) {
    throw py::value_error(name + " is read-only; give a writable array");
  }
  const auto start = reinterpret_cast<std::uintptr_t>(array.data());
  const auto num_bytes = static_cast<std::size_t>(array.nbytes());
  if (num_bytes != 0) {
    extents_.push_back(
        {start, start + num_bytes, written, num_segments_ - 1, field});
  }
  arrays_.push_back(array);
  return array;
}

void ArrayReader::CheckLength(const py::array& array, const char* field) const {
  if (static_cast<std::size_t>(array.size()) != num_elems_) {
    throw py::value_error(Name(field) + " has " + std::to_string(array.size()) +
                          " elements, " + first_field_ + " " +
                          std::to_string(num_elems_) +
                          "; give arrays of one length");
  }
}

GradType ArrayReader::TypeOf(const py::array& array, const char* field) const {
  const py::dtype dtype = array.dtype();
  if (dtype.equal(float32_)) return GradType::kFloat32;
  if (dtype.equal(bfloat16_)) return GradType::kBfloat16;
  if (dtype.equal(float16_)) return GradType::kFloat16;
  throw py::value_error(Name(field) + " has dtype " + Text(dtype) +
                        "; give float32, float16 or ml_dtypes.bfloat16");
}

void ArrayReader::CheckDtype(const py::array& array, const char* field,
                             const py::dtype& dtype) const {
  if (!array.dtype().equal(dtype)) {
    throw py::value_error(Name(field) + " has dtype " + Text(array.dtype()) +
                          "; give " + Text(dtype));
  }
}

}  // namespace sojax
