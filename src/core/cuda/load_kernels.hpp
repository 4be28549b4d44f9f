#pragma once

#include <cuda_runtime.h>

#include <mutex>

#include "core/cuda/check.hpp"

namespace crossdock::cuda {

inline std::mutex& loading_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

/// Brings kernels onto the current device. A kernel is otherwise loaded at its first launch, for
/// which the driver may wait for the device: too late where kernels of other ranks wait for it.
/// One thread at a time: when a rank goes on, the kernels are there.
template <typename... Kernels>
void load_kernels(Kernels... kernels) {
  const std::lock_guard lock(loading_mutex());
  cudaFuncAttributes attributes{};
  (CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernels))), ...);
}

}  // namespace crossdock::cuda
