#include "bench/cuda_device.hpp"

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "bench/gpu_description.hpp"
#include "crossdock/cuda.hpp"

namespace crossdock::bench {
namespace {

// The driver's own version, which the CUDA runtime does not report. The library (NVML) comes with
// the driver and is loaded on demand.
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

int num_gpus_of(int num_ranks) {
  return std::clamp(cuda_device_count(), 1, std::max(1, num_ranks));
}

int gpu_of_rank(int rank) {
  return rank % std::max(1, cuda_device_count());
}

bool gpus_reach_each_other(int num_gpus) {
  for (int a = 0; a < num_gpus; ++a) {
    for (int b = 0; b < num_gpus; ++b) {
      int can_access = 0;
      if (a != b && (cudaDeviceCanAccessPeer(&can_access, a, b) != cudaSuccess || !can_access)) {
        return false;
      }
    }
  }
  return true;
}

GpuDescription describe_gpu() {
  request_a_queue_per_stream();
  GpuDescription gpu{.count = cuda_device_count()};
  for (int device = 0; device < gpu.count; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return {};
    if (gpu.name.find(properties.name) != std::string::npos) continue;
    gpu.name += std::string(gpu.name.empty() ? "" : ", ") + properties.name;
  }
  if (gpu.count > 0) gpu.driver = driver_version();
  return gpu;
}

}  // namespace crossdock::bench
