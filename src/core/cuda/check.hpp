#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace crossdock::cuda {

/// Throws Error(kCuda) with the name of the call; kUnsupported if there is no GPU or no driver.
[[noreturn]] void throw_error(cudaError_t status, const char* call);

inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw_error(status, call);
}

/// The address of a function of the CUDA driver, as of CUDA `version` (12.3: 12030). The runtime is
/// linked, the driver's library is not: its functions are looked up by name. Throws
/// Error(kUnsupported) if the driver is too old.
void* find_driver_function(const char* name, unsigned version);

template <typename Function>
Function driver_function(const char* name, unsigned version) {
  return reinterpret_cast<Function>(find_driver_function(name, version));
}

/// Errors of the driver and of the runtime have the same numbers.
inline void check(CUresult status, const char* call) {
  check(static_cast<cudaError_t>(status), call);
}

}  // namespace crossdock::cuda

/// For every call of the CUDA runtime whose failure matters, and as
/// CROSSDOCK_CUDA(cudaGetLastError()) after each launch.
#define CROSSDOCK_CUDA(call) ::crossdock::cuda::check((call), #call)
