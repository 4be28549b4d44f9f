#pragma once

#include <cudaTypedefs.h>

#include "core/cuda/check.hpp"

namespace crossdock::cuda {

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
