// XLA FFI handlers that deliver a gradient out of a running program.
//
// Arguments: the gradient, and the route operand, int32 [1] (see GradientSink).
// Attribute: place, int64. No results. None takes the GIL or waits for Python;
// a delivery that is refused is an error of the program.
#ifndef CPU_OPS_GRADIENT_OUT_H_
#define CPU_OPS_GRADIENT_OUT_H_

#include "xla/ffi/api/c_api.h"

extern "C" {

// Copies on XLA's own thread.
XLA_FFI_Error* SojaxGradientOutCpu(XLA_FFI_CallFrame* call_frame);

#ifdef SOJAX_WITH_CUDA
// Copies on XLA's stream and is done when the stream has come past the copy.
XLA_FFI_Error* SojaxGradientOutCuda(XLA_FFI_CallFrame* call_frame);
#endif

}  // extern "C"

#endif  // CPU_OPS_GRADIENT_OUT_H_
