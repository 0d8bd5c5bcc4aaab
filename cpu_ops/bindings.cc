// The Python module sojax._cpu_ops. Every argument of a kernel is checked
// before anything is changed and while the GIL is held.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "dispatch.h"
#include "pool.h"
#include "reading.h"
#include "rollback.h"
#include "sink_bindings.h"
#include "update.h"
#include "zero.h"

namespace py = pybind11;

namespace sojax {
namespace {

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

// A job and the arrays that it works on. The pool has it too until the job is
// done, so that it may be dropped. Python objects: touched with the GIL only.
struct Submitted {
  std::shared_ptr<Job> job;
  std::vector<py::array> arrays;

  void Wait() {
    {
      const py::gil_scoped_release release;
      try {
        job->Wait();
      } catch (...) {
        const py::gil_scoped_acquire acquire;
        if (job->IsDone()) arrays.clear();
        throw;
      }
    }
    arrays.clear();
  }
};

using SubmittedPtr = std::shared_ptr<Submitted>;

// A pool and the kernels that it runs. Methods with the name of an operation
// put it into the queue.
class Kernels {
 public:
  Kernels(std::size_t num_threads, const std::string& isa,
          const std::vector<int>& cores)
      : kernels_(FindKernels(isa)),
        process_(getpid()),
        pool_(std::make_unique<Pool>(num_threads, cores)) {}

  ~Kernels() {
    if (getpid() != process_) {
      // After a fork neither threads nor what they wait for can be destroyed.
      pool_.release();
      return;
    }
    Close();
  }

  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  SubmittedPtr AdamStep(const py::iterable& items, const AdamParams& params) {
    ArrayReader reader;
    auto segments = ReadAdamSegments(items, reader);
    return Submit(
        reader, StepItems(kernels_, params, std::move(segments), NumThreads()));
  }

  SubmittedPtr Record(const py::iterable& items, const AdamParams& params,
                      const py::tuple& record_fields) {
    ArrayReader reader;
    auto segments = ReadAdamSegments(items, reader);
    const auto record =
        reader.ReadRecord(record_fields, true, Lengths(segments));
    if (scratch_ == nullptr) {
      scratch_ = std::make_shared<const Scratch>(NumThreads());
    }
    return Submit(reader, RecordItems(kernels_, params, std::move(segments),
                                      record, scratch_));
  }

  SubmittedPtr Finish(const py::iterable& items, const AdamParams& params,
                      const py::tuple& record_fields) {
    ArrayReader reader;
    auto segments = ReadAdamSegments(items, reader);
    const auto record =
        reader.ReadRecord(record_fields, false, Lengths(segments));
    return Submit(reader,
                  FinishItems(kernels_, params, std::move(segments), record));
  }

  SubmittedPtr Undo(const py::iterable& items, const AdamParams& params,
                    const py::tuple& record_fields) {
    ArrayReader reader;
    auto segments = ReadAdamSegments(items, reader);
    const auto record =
        reader.ReadRecord(record_fields, false, Lengths(segments));
    return Submit(reader,
                  UndoItems(kernels_, params, std::move(segments), record));
  }

  SubmittedPtr Redo(const py::iterable& items, const AdamParams& params,
                    double new_grad_scale, const py::tuple& record_fields) {
    ArrayReader reader;
    auto segments = ReadAdamSegments(items, reader);
    const auto record =
        reader.ReadRecord(record_fields, false, Lengths(segments));
    return Submit(reader,
                  RedoItems(kernels_, params, RoundScalar(new_grad_scale),
                            std::move(segments), record));
  }

  SubmittedPtr Widen(const py::iterable& items) {
    ArrayReader reader;
    auto segments = ReadAccumulateSegments(items, reader);
    return Submit(reader,
                  WidenItems(kernels_, std::move(segments), NumThreads()));
  }

  SubmittedPtr Accumulate(const py::iterable& items) {
    ArrayReader reader;
    auto segments = ReadAccumulateSegments(items, reader);
    return Submit(reader,
                  AccumulateItems(kernels_, std::move(segments), NumThreads()));
  }

  SubmittedPtr Squares(const py::iterable& items) {
    ArrayReader reader;
    auto segments = ReadSquaresSegments(items, reader);
    return Submit(reader,
                  SquaresItems(kernels_, std::move(segments), NumThreads()));
  }

  SubmittedPtr Narrow(const py::iterable& items) {
    ArrayReader reader;
    auto segments = ReadNarrowSegments(items, reader);
    return Submit(reader,
                  NarrowItems(kernels_, std::move(segments), NumThreads()));
  }

  SubmittedPtr Zero(const py::iterable& items) {
    ArrayReader reader;
    const auto segments = ReadZeroSegments(items, reader);
    return Submit(reader, ZeroItems(segments));
  }

  void BindToCores(const std::vector<int>& cores) { pool_->BindToCores(cores); }

  void Close() {
    {
      const py::gil_scoped_release release;
      pool_->Close();
    }
    in_flight_.clear();
  }

 private:
  std::size_t NumThreads() const { return pool_->num_threads(); }

  static std::vector<std::size_t> Lengths(
      const std::vector<AdamSegment>& segments) {
    std::vector<std::size_t> lengths;
    for (const AdamSegment& segment : segments) {
      lengths.push_back(segment.num_elems);
    }
    return lengths;
  }

  SubmittedPtr Submit(ArrayReader& reader, Items items) {
    reader.CheckOverlap();
    in_flight_.erase(
        std::remove_if(in_flight_.begin(), in_flight_.end(),
                       [](const SubmittedPtr& x) { return x->job->IsDone(); }),
        in_flight_.end());
    auto submitted = std::make_shared<Submitted>();
    submitted->job = std::make_shared<Job>(
        items.num_items, std::move(items.run), reader.Extents());
    pool_->Submit(submitted->job);
    submitted->arrays = reader.TakeArrays();
    in_flight_.push_back(submitted);
    return submitted;
  }

  const KernelTable& kernels_;
  const pid_t process_;
  std::unique_ptr<Pool> pool_;
  std::shared_ptr<const Scratch> scratch_;
  std::vector<SubmittedPtr> in_flight_;
};

PYBIND11_MODULE(_cpu_ops, module) {
  module.doc() =
      "Kernels and gradient sinks; their public faces are in sojax.host.";
  module.attr("CHUNK_ELEMS") = kChunkElems;
  module.attr("RECORD_CHUNK_ELEMS") = kRecordChunkElems;
  module.attr("RECORD_GROUP_ELEMS") = kGroupElems;
  module.def("available_isas", &AvailableIsas);
  py::class_<AdamParams>(module, "AdamParams")
      .def(py::init(&MakeParams), py::kw_only(), py::arg("b1"), py::arg("b2"),
           py::arg("one_minus_b1"), py::arg("one_minus_b2"), py::arg("k"),
           py::arg("r"), py::arg("s"), py::arg("d"), py::arg("eps"),
           py::arg("grad_scale"));
  py::class_<Submitted, SubmittedPtr>(module, "Submitted")
      .def("wait", &Submitted::Wait)
      .def("done", [](const Submitted& x) { return x.job->IsDone(); });
  py::class_<Kernels>(module, "Pool")
      .def(py::init<std::size_t, const std::string&, const std::vector<int>&>(),
           py::arg("num_threads"), py::arg("isa"), py::arg("cores"))
      .def("adamw_step", &Kernels::AdamStep, py::arg("segments"),
           py::arg("params"))
      .def("record", &Kernels::Record, py::arg("segments"), py::arg("params"),
           py::arg("record"))
      .def("finish", &Kernels::Finish, py::arg("segments"), py::arg("params"),
           py::arg("record"))
      .def("undo", &Kernels::Undo, py::arg("segments"), py::arg("params"),
           py::arg("record"))
      .def("redo", &Kernels::Redo, py::arg("segments"), py::arg("params"),
           py::arg("new_grad_scale"), py::arg("record"))
      .def("widen", &Kernels::Widen, py::arg("segments"))
      .def("accumulate", &Kernels::Accumulate, py::arg("segments"))
      .def("squares", &Kernels::Squares, py::arg("segments"))
      .def("narrow", &Kernels::Narrow, py::arg("segments"))
      .def("zero", &Kernels::Zero, py::arg("segments"))
      .def("bind_to_cores", &Kernels::BindToCores, py::arg("cores"),
           py::call_guard<py::gil_scoped_release>())
      .def("close", &Kernels::Close);
  BindGradientSink(module);
}

}  // namespace
}  // namespace sojax
