#pragma once

#include <cuda_runtime.h>

#include "core/cuda/check.hpp"

namespace crossdock::cuda {

/// Brings kernels onto the current device. A kernel is otherwise loaded at its first launch, for
/// which the driver may wait for the device: too late where kernels of other ranks wait for it.
template <typename... Kernels>
void load_kernels(Kernels... kernels) {
  cudaFuncAttributes attributes{};
  (CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernels))), ...);
}

}  // namespace crossdock::cuda
