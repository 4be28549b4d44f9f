#include "core/cuda/driver.hpp"

#include "core/check.hpp"

namespace crossdock::cuda {

void* find_driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  CROSSDOCK_CUDA(
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) {
    throw Error(ErrorCode::kUnsupported,
                concat("the CUDA driver must have ", name, "; install a newer one"));
  }
  return function;
}

}  // namespace crossdock::cuda
