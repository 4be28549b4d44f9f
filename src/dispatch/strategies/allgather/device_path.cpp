#include "dispatch/device_path.hpp"

#include "dispatch/cuda/cuda_packed.hpp"
#include "dispatch/strategies/allgather/allgather.hpp"

namespace crossdock {

std::unique_ptr<Path> make_allgather_device_path(const PathContext& context, Device device) {
  return std::make_unique<cuda::CudaPacked>(
      context, device.index, cuda::Packing{.arrival_tokens = exchange_arrival_tokens});
}

}  // namespace crossdock
