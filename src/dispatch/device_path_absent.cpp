#include "dispatch/device_path.hpp"

// Builds without CUDA.

namespace crossdock {

std::unique_ptr<Path> make_allgather_device_path(const PathContext& /*context*/,
                                                 Device /*device*/) {
  throw no_cuda_error();
}

std::unique_ptr<Path> make_alltoall_device_path(const PathContext& /*context*/, Device /*device*/) {
  throw no_cuda_error();
}

std::unique_ptr<Path> make_direct_device_path(const PathContext& /*context*/, Device /*device*/,
                                              bool /*sums_per_rank*/) {
  throw no_cuda_error();
}

// The result is unused: making the path throws.
GpuRelation agree_on_gpus(const PathContext& /*context*/, Device /*device*/) {
  return {};
}

std::unique_ptr<Path> make_host_tensors_path(std::unique_ptr<Path> /*path*/, Group& /*group*/,
                                             Device /*device*/) {
  throw no_cuda_error();
}

}  // namespace crossdock
