// Not verified on a GPU: it compiles, and has not been run.
//
// The driver is found at run time, so that the extension also loads where there
// is none.
#include <cuda.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "gradient_out.h"
#include "gradient_sink.h"
#include "xla/ffi/api/ffi.h"

namespace sojax {
namespace {

namespace ffi = xla::ffi;

// Throws std::runtime_error if the driver is not there or too old.
template <class Function>
Function FindInDriver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  void* const symbol = library == nullptr ? nullptr : dlsym(library, name);
  if (symbol == nullptr) {
    throw std::runtime_error(std::string("the CUDA driver has no ") + name);
  }
  return reinterpret_cast<Function>(symbol);
}

struct Driver {
  // cuda.h gives the first this name by a macro; the library has only this one.
  decltype(&cuMemcpyDtoHAsync_v2) copy_to_host =
      FindInDriver<decltype(&cuMemcpyDtoHAsync_v2)>("cuMemcpyDtoHAsync_v2");
  decltype(&cuLaunchHostFunc) launch_host_func =
      FindInDriver<decltype(&cuLaunchHostFunc)>("cuLaunchHostFunc");
};

void Check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  throw std::runtime_error(std::string(what) + " failed with CUDA error " +
                           std::to_string(static_cast<int>(result)));
}

// Runs on a thread of the driver, where no CUDA call is allowed. The driver
// leaves it out after an error of the device: the waits are then interrupted by
// whoever sees that the program failed.
void CUDA_CB Finish(void* delivery) {
  const std::unique_ptr<Delivery> finished(static_cast<Delivery*>(delivery));
  finished->Finish();
}

// The copy is on the program's own stream: what reuses the gradient's buffer
// comes behind it.
void EnqueueDelivery(CUstream stream, const void* gradient,
                     std::size_t num_bytes, const void* route,
                     std::int64_t place) {
  static const Driver driver;
  auto delivery = std::make_unique<Delivery>(
      Delivery::Begin(route, place, num_bytes, Delivery::Copier::kDevice));
  if (num_bytes != 0) {
    try {
      Check(driver.copy_to_host(delivery->data(),
                                reinterpret_cast<CUdeviceptr>(gradient),
                                num_bytes, stream),
            "cuMemcpyDtoHAsync");
    } catch (...) {
      delivery->Cancel();
      throw;
    }
  }
  // If this fails the copy is under way, and nothing will say when it ends: the
  // sink goes on counting it.
  Check(driver.launch_host_func(stream, &Finish, delivery.get()),
        "cuLaunchHostFunc");
  delivery.release();
}

ffi::Error GradientOut(CUstream stream, ffi::AnyBuffer gradient,
                       ffi::BufferR1<ffi::DataType::S32> route,
                       std::int64_t place) {
  try {
    EnqueueDelivery(stream, gradient.untyped_data(), gradient.size_bytes(),
                    route.untyped_data(), place);
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, error.what());
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sojax

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SojaxGradientOutCuda, sojax::GradientOut,
    xla::ffi::Ffi::Bind()
        .Ctx<xla::ffi::PlatformStream<CUstream>>()
        .Arg<xla::ffi::AnyBuffer>()
        .Arg<xla::ffi::BufferR1<xla::ffi::DataType::S32>>()
        .Attr<std::int64_t>("place"));
