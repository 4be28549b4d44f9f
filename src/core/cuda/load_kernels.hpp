#pragma once

#include <cuda_runtime.h>

#include <mutex>

#include "core/cuda/check.hpp"

namespace crossdock::cuda {

inline std::mutex& loading_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

/// Loads kernels onto the current device. Otherwise a kernel is loaded at its first launch, for
/// which the driver may wait for the device; if kernels of other ranks wait for that launch, they
/// deadlock. Only one thread loads at a time, so the kernels are loaded once any rank returns.
template <typename... Kernels>
void load_kernels(Kernels... kernels) {
  const std::lock_guard lock(loading_mutex());
  cudaFuncAttributes attributes{};
  (CROSSDOCK_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernels))), ...);
}

}  // namespace crossdock::cuda
