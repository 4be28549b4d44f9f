#include "core/cuda/check.hpp"

#include "core/check.hpp"

namespace crossdock::cuda {

void throw_error(cudaError_t status, const char* call) {
  cudaGetLastError();  // a non-sticky error must not reappear at the next call
  const bool no_device = status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver ||
                         status == cudaErrorInitializationError || status == cudaErrorStubLibrary;
  if (no_device) {
    throw Error(ErrorCode::kUnsupported,
                concat("no CUDA device: ", cudaGetErrorString(status),
                       "; CUDA tensors need a machine with an NVIDIA GPU and its driver"));
  }
  throw Error(ErrorCode::kCuda,
              concat(call, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"));
}

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
