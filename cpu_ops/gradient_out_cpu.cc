#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>

#include "gradient_out.h"
#include "gradient_sink.h"
#include "xla/ffi/api/ffi.h"

namespace sojax {
namespace {

namespace ffi = xla::ffi;

ffi::Error GradientOut(ffi::AnyBuffer gradient,
                       ffi::BufferR1<ffi::DataType::S32> route,
                       std::int64_t place) {
  try {
    const std::size_t num_bytes = gradient.size_bytes();
    Delivery delivery = Delivery::Begin(route.untyped_data(), place, num_bytes,
                                        Delivery::Copier::kHost);
    if (num_bytes != 0) {
      std::memcpy(delivery.data(), gradient.untyped_data(), num_bytes);
    }
    delivery.Finish();
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, error.what());
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace sojax

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    SojaxGradientOutCpu, sojax::GradientOut,
    xla::ffi::Ffi::Bind()
        .Arg<xla::ffi::AnyBuffer>()
        .Arg<xla::ffi::BufferR1<xla::ffi::DataType::S32>>()
        .Attr<std::int64_t>("place"));
