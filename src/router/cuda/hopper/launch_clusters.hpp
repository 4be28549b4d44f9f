#pragma once

#include <cuda_runtime.h>

#include <array>

#include "core/cuda/check.hpp"
#include "core/cuda/launch.hpp"
#include "core/sizes.hpp"

// Kernels for sm_90a, with much shared memory.

namespace crossdock::router::hopper {

/// Loads a kernel onto the current device. False if it was not compiled for it, and so has no body,
/// which declares shared memory.
template <typename... Params>
bool load_kernel(void (*kernel)(Params...), int64_t shared_bytes) {
  cuda::load_kernels(kernel);
  cudaFuncAttributes attributes{};
  CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  if (attributes.sharedSizeBytes == 0) return false;
  CROSSDOCK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared_bytes)));
  return true;
}

struct ClusterShape {
  int cluster_size;  // blocks, which are neighbours across
  int64_t across;    // blocks; rounded up to whole clusters
  int64_t down;
  int threads;
  int64_t shared_bytes;
};

/// As cuda::launch_early.
template <typename... Params>
void launch_clusters(void (*kernel)(Params...), const ClusterShape& shape, cudaStream_t stream,
                     const Params&... args) {
  const auto size = static_cast<unsigned>(shape.cluster_size);
  std::array<cudaLaunchAttribute, 2> attributes{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {size, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(round_up(shape.across, int64_t{size})),
                        static_cast<unsigned>(shape.down));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = attributes.size();
  CROSSDOCK_CUDA(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace crossdock::router::hopper
