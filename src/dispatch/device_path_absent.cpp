#include <utility>

#include "core/check.hpp"
#include "crossdock/cuda.hpp"
#include "dispatch/device_path.hpp"

namespace crossdock {

std::unique_ptr<DevicePath> make_staged_path(DevicePathContext context, Device device) {
  return make_device_path(std::move(context), device);
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): builds with CUDA keep the context
std::unique_ptr<DevicePath> make_device_path(DevicePathContext /*context*/, Device /*device*/) {
  throw Error(ErrorCode::kUnsupported, concat("this build has no CUDA (", cuda_missing_reason(),
                                              "); configure with CROSSDOCK_WITH_CUDA=ON"));
}

}  // namespace crossdock
