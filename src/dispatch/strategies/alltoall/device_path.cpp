#include "dispatch/device_path.hpp"

#include "dispatch/cuda/cuda_packed.hpp"

namespace crossdock {

std::unique_ptr<Path> make_alltoall_device_path(const PathContext& context, Device device) {
  return std::make_unique<cuda::CudaPacked>(context, device.index, cuda::Packing{});
}

}  // namespace crossdock
