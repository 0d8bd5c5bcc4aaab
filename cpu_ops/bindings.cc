// The Python module sojax._cpu_ops. Every argument is checked here, before
// anything is changed and while the GIL is held.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "adam.h"
#include "dispatch.h"
#include "fp_mode.h"
#include "pool.h"
#include "update.h"

namespace py = pybind11;

namespace sojax {
namespace {

// The bytes of one array, and how to name it in an error.
struct Extent {
  std::uintptr_t start;
  std::uintptr_t end;
  bool written;
  std::size_t segment;
  const char* field;
};

std::string Name(std::size_t segment, const char* field) {
  return "segments[" + std::to_string(segment) + "]." + field;
}

std::string Name(const Extent& extent) {
  return Name(extent.segment, extent.field);
}

std::string Text(const py::handle& object) {
  return py::cast<std::string>(py::str(object));
}

// Throws if an array that is written shares bytes with any other.
// O(k log k): in order of their starts, an extent overlaps an earlier one
// exactly if it overlaps the one that reaches furthest.
void CheckOverlap(std::vector<Extent> extents) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.start < b.start; });
  const Extent* furthest = nullptr;
  const Extent* furthest_written = nullptr;
  for (const Extent& extent : extents) {
    const Extent* other = extent.written ? furthest : furthest_written;
    if (other != nullptr && extent.start < other->end) {
      throw py::value_error(
          Name(*other) + " and " + Name(extent) + " overlap by " +
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

// Reads one segment after the other from Python tuples, and keeps their arrays
// alive for as long as it lives.
class SegmentReader {
 public:
  void Read(const py::handle& item) {
    const auto fields = item.cast<py::tuple>();
    if (fields.size() != 5) {
      throw py::value_error("segments[" + std::to_string(index_) + "] has " +
                            std::to_string(fields.size()) + " fields, not 5");
    }
    const py::array p = Checked(fields[0], "p_inout", true);
    const py::array mu = Checked(fields[1], "mu_inout", true);
    const py::array nu = Checked(fields[2], "nu_inout", true);
    const py::array grad = Checked(fields[3], "grad", false);
    AdamSegment segment{};
    segment.num_elems = static_cast<std::size_t>(p.size());
    segment.buffers.p = Floats(p, "p_inout", p.size());
    segment.buffers.mu = Floats(mu, "mu_inout", p.size());
    segment.buffers.nu = Floats(nu, "nu_inout", p.size());
    segment.buffers.grad = grad.data();
    segment.grad_type = IsBfloat16(grad, "grad", p.size()) ? GradType::kBfloat16
                                                           : GradType::kFloat32;
    if (!fields[4].is_none()) {
      py::array weight = Checked(fields[4], "weight_out", true);
      segment.weight_type = IsBfloat16(weight, "weight_out", p.size())
                                ? WeightType::kBfloat16
                                : WeightType::kFloat32;
      segment.buffers.weight = weight.mutable_data();
    }
    segments_.push_back(segment);
    ++index_;
  }

  // Returns the segments read, once no two arrays of them conflict.
  const std::vector<AdamSegment>& Finish() const {
    CheckOverlap(extents_);
    return segments_;
  }

 private:
  // Checks all but the element type and the length.
  py::array Checked(const py::object& object, const char* field, bool written) {
    const std::string name = Name(index_, field);
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
      extents_.push_back({start, start + num_bytes, written, index_, field});
    }
    arrays_.push_back(array);
    return array;
  }

  void CheckLength(const py::array& array, const char* field,
                   py::ssize_t num_elems) const {
    if (array.size() != num_elems) {
      throw py::value_error(Name(index_, field) + " has " +
                            std::to_string(array.size()) +
                            " elements, p_inout " + std::to_string(num_elems) +
                            "; give arrays of one length");
    }
  }

  float* Floats(py::array array, const char* field,
                py::ssize_t num_elems) const {
    CheckLength(array, field, num_elems);
    if (!array.dtype().equal(float32_)) {
      throw py::value_error(Name(index_, field) + " has dtype " +
                            Text(array.dtype()) + "; give float32");
    }
    return static_cast<float*>(array.mutable_data());
  }

  bool IsBfloat16(const py::array& array, const char* field,
                  py::ssize_t num_elems) const {
    CheckLength(array, field, num_elems);
    if (array.dtype().equal(bfloat16_)) return true;
    if (array.dtype().equal(float32_)) return false;
    throw py::value_error(Name(index_, field) + " has dtype " +
                          Text(array.dtype()) +
                          "; give float32 or ml_dtypes.bfloat16");
  }

  const py::dtype float32_ = py::dtype::of<float>();
  const py::dtype bfloat16_ =
      py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16"));
  std::size_t index_ = 0;
  std::vector<AdamSegment> segments_;
  std::vector<Extent> extents_;
  std::vector<py::array> arrays_;
};

const KernelTable& FindKernels(const std::string& isa) {
  std::string available;
  for (const KernelTable* table : AvailableKernels()) {
    if (isa == table->isa) return *table;
    if (!available.empty()) available += ", ";
    available += table->isa;
  }
  throw py::value_error("isa='" + isa + "' is not available on this machine;" +
                        " it has " + available);
}

std::vector<std::string> AvailableIsas() {
  std::vector<std::string> isas;
  for (const KernelTable* table : AvailableKernels()) {
    isas.emplace_back(table->isa);
  }
  return isas;
}

float Rounded(double x) { return static_cast<float>(x); }

// Takes doubles and rounds them here, since the caller may be in a mode where
// a small one would be rounded to zero.
AdamParams MakeParams(double b1, double b2, double one_minus_b1,
                      double one_minus_b2, double k, double r, double s,
                      double d, double eps, double grad_scale) {
  const ScopedDefaultFpMode fp_mode;
  float (*volatile round)(double) = &Rounded;  // not moved out of the scope
  return {round(b1),
          round(b2),
          round(one_minus_b1),
          round(one_minus_b2),
          round(k),
          round(r),
          round(s),
          round(d),
          round(eps),
          round(grad_scale)};
}

// A pool and the kernels that it runs.
class Stepper {
 public:
  Stepper(std::size_t num_threads, const std::string& isa,
          const std::vector<int>& cores)
      : kernels_(FindKernels(isa)), pool_(num_threads, cores) {}

  void AdamStep(const py::iterable& items, const AdamParams& params) {
    SegmentReader reader;
    for (const py::handle& item : items) reader.Read(item);
    const std::vector<AdamSegment>& segments = reader.Finish();
    const py::gil_scoped_release release;
    AdamUpdate(pool_, kernels_, params, segments);
  }

  void Close() {
    const py::gil_scoped_release release;
    pool_.Close();
  }

 private:
  const KernelTable& kernels_;
  Pool pool_;
};

PYBIND11_MODULE(_cpu_ops, module) {
  module.doc() = "The host kernels; sojax.host.kernels is their public face.";
  module.def("available_isas", &AvailableIsas);
  py::class_<AdamParams>(module, "AdamParams")
      .def(py::init(&MakeParams), py::kw_only(), py::arg("b1"), py::arg("b2"),
           py::arg("one_minus_b1"), py::arg("one_minus_b2"), py::arg("k"),
           py::arg("r"), py::arg("s"), py::arg("d"), py::arg("eps"),
           py::arg("grad_scale"));
  py::class_<Stepper>(module, "Pool")
      .def(py::init<std::size_t, const std::string&, const std::vector<int>&>(),
           py::arg("num_threads"), py::arg("isa"), py::arg("cores"))
      .def("adamw_step", &Stepper::AdamStep, py::arg("segments"),
           py::arg("params"))
      .def("close", &Stepper::Close);
}

}  // namespace
}  // namespace sojax
