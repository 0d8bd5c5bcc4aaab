// The Python module sojax._cpu_ops. Every argument is checked before anything
// is changed and while the GIL is held.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "adam.h"
#include "arguments.h"
#include "dispatch.h"
#include "fp_mode.h"
#include "pool.h"
#include "update.h"

namespace py = pybind11;

namespace sojax {
namespace {

std::vector<AdamSegment> ReadAdamSegments(const py::iterable& items,
                                          ArrayReader& reader) {
  std::vector<AdamSegment> segments;
  for (const py::handle& item : items) {
    const py::tuple fields = reader.NextSegment(item, 5);
    AdamSegment segment{};
    segment.buffers.p = reader.Floats(fields[0], "p_inout");
    segment.buffers.mu = reader.Floats(fields[1], "mu_inout");
    segment.buffers.nu = reader.Floats(fields[2], "nu_inout");
    segment.buffers.grad = reader.Grad(fields[3], "grad", &segment.grad_type);
    segment.buffers.weight =
        reader.Weight(fields[4], "weight_out", &segment.weight_type);
    segment.num_elems = reader.num_elems();
    segments.push_back(segment);
  }
  reader.CheckOverlap();
  return segments;
}

std::vector<AccumulateSegment> ReadAccumulateSegments(const py::iterable& items,
                                                      ArrayReader& reader) {
  std::vector<AccumulateSegment> segments;
  for (const py::handle& item : items) {
    const py::tuple fields = reader.NextSegment(item, 3);
    AccumulateSegment segment{};
    segment.buffers.sum = reader.Floats(fields[0], "sum_inout");
    segment.buffers.grad = reader.Grad(fields[1], "grad", &segment.grad_type);
    segment.buffers.sumsq = reader.ChunkSums(fields[2], "sumsq_out");
    segment.num_elems = reader.num_elems();
    segments.push_back(segment);
  }
  reader.CheckOverlap();
  return segments;
}

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

// The names of the instruction sets and the sizes of their registers in bits.
std::vector<std::pair<std::string, unsigned>> AvailableIsas() {
  std::vector<std::pair<std::string, unsigned>> isas;
  for (const KernelTable* table : AvailableKernels()) {
    isas.emplace_back(table->isa, table->vector_bits);
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
class Kernels {
 public:
  Kernels(std::size_t num_threads, const std::string& isa,
          const std::vector<int>& cores)
      : kernels_(FindKernels(isa)), pool_(num_threads, cores) {}

  void AdamStep(const py::iterable& items, const AdamParams& params) {
    ArrayReader reader;
    const auto segments = ReadAdamSegments(items, reader);
    const py::gil_scoped_release release;
    AdamUpdate(pool_, kernels_, params, segments);
  }

  void Widen(const py::iterable& items) {
    ArrayReader reader;
    const auto segments = ReadAccumulateSegments(items, reader);
    const py::gil_scoped_release release;
    sojax::Widen(pool_, kernels_, segments);
  }

  void Accumulate(const py::iterable& items) {
    ArrayReader reader;
    const auto segments = ReadAccumulateSegments(items, reader);
    const py::gil_scoped_release release;
    sojax::Accumulate(pool_, kernels_, segments);
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
  module.attr("CHUNK_ELEMS") = kChunkElems;
  module.def("available_isas", &AvailableIsas);
  py::class_<AdamParams>(module, "AdamParams")
      .def(py::init(&MakeParams), py::kw_only(), py::arg("b1"), py::arg("b2"),
           py::arg("one_minus_b1"), py::arg("one_minus_b2"), py::arg("k"),
           py::arg("r"), py::arg("s"), py::arg("d"), py::arg("eps"),
           py::arg("grad_scale"));
  py::class_<Kernels>(module, "Pool")
      .def(py::init<std::size_t, const std::string&, const std::vector<int>&>(),
           py::arg("num_threads"), py::arg("isa"), py::arg("cores"))
      .def("adamw_step", &Kernels::AdamStep, py::arg("segments"),
           py::arg("params"))
      .def("widen", &Kernels::Widen, py::arg("segments"))
      .def("accumulate", &Kernels::Accumulate, py::arg("segments"))
      .def("close", &Kernels::Close);
}

}  // namespace
}  // namespace sojax
