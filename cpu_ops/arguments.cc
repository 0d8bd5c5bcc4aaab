#include "arguments.h"

#include <pybind11/gil_safe_call_once.h>

#include <algorithm>

#include "accumulate.h"

namespace py = pybind11;

namespace sojax {
namespace {

// Stands for the number of a segment.
constexpr std::size_t kRecord = SIZE_MAX;

std::string Text(const py::handle& object) {
  return py::cast<std::string>(py::str(object));
}

}  // namespace

const Dtypes& Dtypes::Get() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Dtypes> dtypes;
  return dtypes.call_once_and_store_result([] { return Dtypes(); })
      .get_stored();
}

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
  CheckLength(array, field);
  CheckDtype(array, field, dtypes_.float32);
  return static_cast<float*>(array.mutable_data());
}

const float* ArrayReader::ConstFloats(const py::object& object,
                                      const char* field) {
  const py::array array = Flat(object, field, false);
  CheckLength(array, field);
  CheckDtype(array, field, dtypes_.float32);
  return static_cast<const float*>(array.data());
}

const float* ArrayReader::OptionalFloats(const py::object& object,
                                         const char* field) {
  return object.is_none() ? nullptr : ConstFloats(object, field);
}

void* ArrayReader::Master(const py::object& object, const char* field,
                          const py::object& low, const char* low_field,
                          std::int16_t** low_halves, MasterType* type) {
  *type = low.is_none() ? MasterType::kFloat32 : MasterType::kSplit;
  *low_halves = nullptr;
  if (*type == MasterType::kFloat32) return Floats(object, field);
  py::array high_array = Flat(object, field, true);
  CheckLength(high_array, field);
  CheckDtype(high_array, field, dtypes_.bfloat16);
  py::array low_array = Flat(low, low_field, true);
  CheckLength(low_array, low_field);
  CheckDtype(low_array, low_field, dtypes_.int16);
  *low_halves = static_cast<std::int16_t*>(low_array.mutable_data());
  return high_array.mutable_data();
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
  CheckSize(array, field, NumChunks(num_elems_),
            "one for each " + std::to_string(kChunkElems) + " of the " +
                std::to_string(num_elems_) + " elements of " + first_field_);
  CheckDtype(array, field, dtypes_.float64);
  return static_cast<double*>(array.mutable_data());
}

std::byte* ArrayReader::Bytes(const py::object& object, const char* field,
                              std::size_t* num_bytes) {
  py::array array = Flat(object, field, true);
  if (py::cast<bool>(array.dtype().attr("hasobject"))) {
    throw py::value_error(Name(field) + " has dtype " + Text(array.dtype()) +
                          ", which holds Python objects; give one of numbers");
  }
  *num_bytes = static_cast<std::size_t>(array.nbytes());
  return static_cast<std::byte*>(array.mutable_data());
}

void ArrayReader::Require(const py::object& object, const char* field) const {
  if (object.is_none()) {
    throw py::type_error(Name(field) + " is None; give a numpy.ndarray");
  }
}

std::size_t ArrayReader::LayoutIndex(const Layout& layout) const {
  const std::size_t index = FindLayout(layout);
  if (index == kNumLayouts) {
    static constexpr const char* kNames[] = {"none", "float32", "bfloat16",
                                             "float16"};
    const bool is_split = layout.master == MasterType::kSplit;
    throw py::value_error(
        "segments[" + std::to_string(num_segments_ - 1) +
        "] has gradients of " + kNames[static_cast<int>(layout.grad) + 1] +
        (is_split ? ", split masters" : "") + " and weights out of " +
        kNames[static_cast<int>(layout.weight)] +
        ", for which there is no kernel; " +
        (is_split ? "split masters take gradients of float32 or bfloat16 and"
                    " are themselves the weights out"
                  : "use float32 or one 16-bit type for both"));
  }
  return index;
}

Record ArrayReader::ReadRecord(const py::tuple& fields, bool written,
                               const std::vector<std::size_t>& lengths) {
  in_record_ = true;
  Record record{};
  const auto bytes_per_param = fields[0].cast<std::size_t>();
  record.form =
      bytes_per_param == 3 ? RecordForm::kThreeBytes : RecordForm::kTwoBytes;
  std::size_t num_bytes = 0;
  std::size_t num_chunks = 0;
  for (const std::size_t n : lengths) {
    num_bytes += CodesBytes(record.form, n);
    num_chunks += NumRecordChunks(n);
  }
  const std::string reason = "that is what these segments need";
  py::array codes = Flat(fields[1], "codes", written);
  CheckDtype(codes, "codes", dtypes_.uint8);
  CheckSize(codes, "codes", num_bytes, reason);
  if (num_bytes != 0 &&
      reinterpret_cast<std::uintptr_t>(codes.data()) % kGroupElems != 0) {
    throw py::value_error("record.codes does not start at a multiple of " +
                          std::to_string(kGroupElems) +
                          " bytes; take it from an Arena or new_record");
  }
  py::array escapes = Flat(fields[2], "escapes", written);
  CheckDtype(escapes, "escapes", dtypes_.float32);
  py::array offsets = Flat(fields[3], "offsets", written);
  CheckDtype(offsets, "offsets", dtypes_.int64);
  CheckSize(offsets, "offsets", num_chunks + 1, reason);
  // Only read where it is not written.
  const auto data = [](const py::array& array) {
    return const_cast<void*>(array.data());
  };
  record.codes = static_cast<std::uint8_t*>(data(codes));
  record.escapes = static_cast<float*>(data(escapes));
  record.capacity = static_cast<std::size_t>(escapes.size());
  record.offsets = static_cast<std::int64_t*>(data(offsets));
  return record;
}

std::vector<Extent> ArrayReader::Extents() const {
  return {extents_.begin(), extents_.end()};
}

// In order of their starts, an extent overlaps an earlier one exactly if it
// overlaps the one that reaches furthest.
void ArrayReader::CheckOverlap() const {
  std::vector<NamedExtent> extents = extents_;
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.start < b.start; });
  const NamedExtent* furthest = nullptr;
  const NamedExtent* furthest_written = nullptr;
  for (const NamedExtent& extent : extents) {
    const NamedExtent* other = extent.written ? furthest : furthest_written;
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
  if (segment == kRecord) return std::string("record.") + field;
  return "segments[" + std::to_string(segment) + "]." + field;
}

std::string ArrayReader::Name(const char* field) const {
  return Name(in_record_ ? kRecord : num_segments_ - 1, field);
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
    extents_.push_back({{start, start + num_bytes, written},
                        in_record_ ? kRecord : num_segments_ - 1,
                        field});
  }
  arrays_.push_back(array);
  return array;
}

void ArrayReader::CheckLength(const py::array& array, const char* field) {
  if (first_field_ == nullptr) {
    first_field_ = field;
    num_elems_ = static_cast<std::size_t>(array.size());
  }
  if (static_cast<std::size_t>(array.size()) != num_elems_) {
    throw py::value_error(Name(field) + " has " + std::to_string(array.size()) +
                          " elements, " + first_field_ + " " +
                          std::to_string(num_elems_) +
                          "; give arrays of one length");
  }
}

void ArrayReader::CheckSize(const py::array& array, const char* field,
                            std::size_t size, const std::string& reason) const {
  if (static_cast<std::size_t>(array.size()) != size) {
    throw py::value_error(Name(field) + " has " + std::to_string(array.size()) +
                          " elements; give " + std::to_string(size) + ", " +
                          reason);
  }
}

GradType ArrayReader::TypeOf(const py::array& array, const char* field) const {
  const py::dtype dtype = array.dtype();
  if (dtype.equal(dtypes_.float32)) return GradType::kFloat32;
  if (dtype.equal(dtypes_.bfloat16)) return GradType::kBfloat16;
  if (dtype.equal(dtypes_.float16)) return GradType::kFloat16;
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
