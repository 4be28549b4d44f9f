#include "bench/cuda_device.hpp"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <string>

#include "bench/gpu_description.hpp"
#include "crossdock/cuda.hpp"

namespace crossdock::bench {
namespace {

// The driver's own version, which the CUDA runtime does not tell. The library (NVML) comes with the
// driver and is loaded on demand.
std::string driver_version() {
  void* nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (nvml == nullptr) return "";
  using Call = int (*)();
  using Read = int (*)(char*, unsigned int);
  const auto init = reinterpret_cast<Call>(dlsym(nvml, "nvmlInit_v2"));
  const auto shut_down = reinterpret_cast<Call>(dlsym(nvml, "nvmlShutdown"));
  const auto read = reinterpret_cast<Read>(dlsym(nvml, "nvmlSystemGetDriverVersion"));
  std::array<char, 81> version{};  // the length that NVML documents, and a zero
  if (init != nullptr && shut_down != nullptr && read != nullptr && init() == 0) {
    if (read(version.data(), version.size() - 1) != 0) version[0] = '\0';
    shut_down();
  }
  dlclose(nvml);
  return version.data();
}

}  // namespace

void request_a_queue_per_stream() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
}

GpuDescription describe_gpu() {
  request_a_queue_per_stream();
  if (cuda_device_count() == 0) return {};
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return {};
  return {.name = properties.name, .driver = driver_version()};
}

}  // namespace crossdock::bench
