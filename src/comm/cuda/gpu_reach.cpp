#include "comm/cuda/gpu_reach.hpp"

#include <cuda_runtime.h>

#include <atomic>
#include <cstring>

#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

std::atomic<int> num_unreachable_scopes = 0;

// Precedes the unreachable GPUs in the bytes of a GpuReach.
struct ReachHeader {
  GpuId gpu;
  int32_t reaches_nobody;
};

GpuId id_of(int device) {
  GpuId id{};
  CROSSDOCK_CUDA(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), device));
  return id;
}

}  // namespace

UnreachableGpus::UnreachableGpus() {
  ++num_unreachable_scopes;
}

UnreachableGpus::~UnreachableGpus() {
  --num_unreachable_scopes;
}

GpuReach reach_of(int device) {
  GpuReach reach{.gpu = id_of(device), .reaches_nobody = num_unreachable_scopes > 0};
  for (int other = 0; other < num_devices(); ++other) {
    int can_access = 1;
    if (other != device) {
      CROSSDOCK_CUDA(cudaDeviceCanAccessPeer(&can_access, device, other));
    }
    if (can_access == 0) reach.unreachable.push_back(id_of(other));
  }
  return reach;
}

std::vector<std::byte> GpuReach::to_bytes() const {
  const ReachHeader header{.gpu = gpu, .reaches_nobody = reaches_nobody ? 1 : 0};
  std::vector<std::byte> bytes(sizeof(header) + unreachable.size() * sizeof(GpuId));
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::memcpy(bytes.data() + sizeof(header), unreachable.data(),
              unreachable.size() * sizeof(GpuId));
  return bytes;
}

GpuReach GpuReach::from_bytes(std::span<const std::byte> bytes) {
  ReachHeader header{};
  std::memcpy(&header, bytes.data(), sizeof(header));
  GpuReach reach{.gpu = header.gpu, .reaches_nobody = header.reaches_nobody != 0};
  reach.unreachable.resize((bytes.size() - sizeof(header)) / sizeof(GpuId));
  std::memcpy(reach.unreachable.data(), bytes.data() + sizeof(header),
              reach.unreachable.size() * sizeof(GpuId));
  return reach;
}

}  // namespace crossdock::cuda
