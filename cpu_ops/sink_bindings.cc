#include "sink_bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gradient_out.h"
#include "gradient_sink.h"

namespace py = pybind11;

namespace sojax {
namespace {

// A sink, and the arrays of its destinations.
class PySink {
 public:
  ~PySink() { Close(); }

  std::size_t AddRoute(
      const std::vector<std::pair<std::uintptr_t, py::list>>& shards) {
    std::vector<ShardRoute> routes;
    std::vector<py::array> arrays;
    for (const auto& [address, destinations] : shards) {
      ShardRoute& shard = routes.emplace_back();
      shard.address = reinterpret_cast<const void*>(address);
      for (const py::handle& item : destinations) {
        auto array = Checked(item, shard.destinations.size());
        shard.destinations.push_back(
            {array.mutable_data(), static_cast<std::size_t>(array.nbytes())});
        arrays.push_back(std::move(array));
      }
    }
    const std::size_t number = sink_->AddRoute(routes);
    arrays_.insert(arrays_.end(), arrays.begin(), arrays.end());
    return number;
  }

  bool Wait(std::size_t route, const std::vector<std::size_t>& places,
            std::uint64_t ticket) {
    WaitResult result;
    {
      const py::gil_scoped_release release;
      result = sink_->Wait(route, places, ticket);
    }
    if (result == WaitResult::kClosed) {
      throw py::value_error("the sink is closed; make a new one");
    }
    return result == WaitResult::kDelivered;
  }

  void Interrupt(std::uint64_t first_ticket) { sink_->Interrupt(first_ticket); }

  void Reset() { sink_->Reset(); }

  void Close() {
    std::size_t num_device_copies;
    {
      const py::gil_scoped_release release;
      num_device_copies = sink_->Close();
    }
    // What a device may still write to is never freed.
    if (num_device_copies != 0) {
      new std::vector<py::array>(std::move(arrays_));
    }
    arrays_.clear();
  }

 private:
  static py::array Checked(const py::handle& item, std::size_t place) {
    const std::string name = "destination " + std::to_string(place);
    if (!py::isinstance<py::array>(item)) {
      throw py::type_error(name + " is not a numpy.ndarray");
    }
    auto array = py::reinterpret_borrow<py::array>(item);
    if (array.ndim() != 1 || (array.flags() & py::array::c_style) == 0 ||
        !array.writeable()) {
      throw py::value_error(name +
                            " must be flat, contiguous and writable; give a"
                            " view of it: reshape(-1)");
    }
    return array;
  }

  std::vector<py::array> arrays_;
  const std::shared_ptr<GradientSink> sink_ = std::make_shared<GradientSink>();
};

py::capsule Handler(XLA_FFI_Error* (*function)(XLA_FFI_CallFrame*)) {
  return py::capsule(reinterpret_cast<void*>(function),
                     "xla._CUSTOM_CALL_TARGET");
}

py::dict Handlers() {
  py::dict handlers;
  handlers["cpu"] = Handler(&SojaxGradientOutCpu);
#ifdef SOJAX_WITH_CUDA
  handlers["CUDA"] = Handler(&SojaxGradientOutCuda);
#endif
  return handlers;
}

}  // namespace

void BindGradientSink(py::module_& module) {
  module.def("gradient_out_handlers", &Handlers);
  py::class_<PySink>(module, "GradientSink")
      .def(py::init<>())
      .def("add_route", &PySink::AddRoute, py::arg("shards"))
      .def("wait", &PySink::Wait, py::arg("route"), py::arg("places"),
           py::arg("ticket"))
      .def("interrupt", &PySink::Interrupt, py::arg("first_ticket"))
      .def("reset", &PySink::Reset)
      .def("close", &PySink::Close);
}

}  // namespace sojax
