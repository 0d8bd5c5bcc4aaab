// The part of the Python module that programs deliver gradients through.
#ifndef CPU_OPS_SINK_BINDINGS_H_
#define CPU_OPS_SINK_BINDINGS_H_

#include <pybind11/pybind11.h>

namespace sojax {

// Adds GradientSink, and the FFI handlers as capsules, to the module.
void BindGradientSink(pybind11::module_& module);

}  // namespace sojax

#endif  // CPU_OPS_SINK_BINDINGS_H_
