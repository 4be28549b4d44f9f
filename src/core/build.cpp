#include "core/build_info.hpp"
#include "core/descriptor.hpp"
#include "crossdock/crossdock.hpp"
#include "crossdock/cuda.hpp"

#if CROSSDOCK_HAS_CUDA
#include <cuda_runtime.h>
#endif

namespace crossdock {

BuildDescription describe_build() {
  return {.version = build_info::kVersion,
          .revision = build_info::kRevision,
          .compiler = build_info::kCompiler,
          .build_type = build_info::kBuildType,
          .sanitizers = build_info::kSanitizers,
          .features = {{"mpi", build_info::kWithMpi, build_info::kMpiNote},
                       {"cuda", build_info::kWithCuda, build_info::kCudaNote}}};
}

bool cuda_is_built() {
  return build_info::kWithCuda;
}

#if CROSSDOCK_HAS_CUDA

namespace {

cudaError_t count_devices(int& count) noexcept {
  const StandardDescriptorGuard guard;  // the driver opens devices
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    count = 0;
    cudaGetLastError();  // the runtime would report it again at the next call
  }
  return status;
}

}  // namespace

int cuda_device_count() noexcept {
  int count = 0;
  count_devices(count);
  return count;
}

std::string cuda_missing_reason() {
  int count = 0;
  const cudaError_t status = count_devices(count);
  if (count > 0) return {};
  return status == cudaSuccess ? "the driver reports no GPU" : cudaGetErrorString(status);
}

#else  // make_stream_wait is in core/cuda/stream.cpp

int cuda_device_count() noexcept {
  return 0;
}

std::string cuda_missing_reason() {
  return build_info::kCudaNote;
}

void make_stream_wait(Stream /*waiting*/, Stream /*awaited*/, Device /*device*/) {
  throw Error(ErrorCode::kUnsupported, cuda_missing_reason());
}

#endif

}  // namespace crossdock
