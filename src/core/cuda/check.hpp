#pragma once

#include <cuda_runtime.h>

namespace crossdock::cuda {

/// Throws Error(kCuda) with the name of the call; kUnsupported if there is no GPU or no driver.
[[noreturn]] void throw_error(cudaError_t status, const char* call);

inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw_error(status, call);
}

}  // namespace crossdock::cuda

/// For every call of the CUDA runtime whose failure matters, and as
/// CROSSDOCK_CUDA(cudaGetLastError()) after each launch.
#define CROSSDOCK_CUDA(call) ::crossdock::cuda::check((call), #call)
