#include "comm/cuda/gpu_reach.hpp"

#include <cuda_runtime.h>

#include <cstring>

#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

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

GpuReach reach_of(int device) {
  GpuReach reach{.gpu = id_of(device)};
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

namespace {

CUdeviceptr address_of(const void* data) {
  return reinterpret_cast<CUdeviceptr>(data);
}

// False if the driver does not know the attribute of this memory.
template <typename Value>
bool get_attribute(CUpointer_attribute attribute, const void* data, Value& value) {
  static const auto kGet =
      driver_function<PFN_cuPointerGetAttribute_v4000>("cuPointerGetAttribute", 4000);
  return kGet(&value, attribute, address_of(data)) == CUDA_SUCCESS;
}

cudaMemPool_t pool_of(const void* data) {
  CUmemoryPool pool = nullptr;
  return get_attribute(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, data, pool) ? pool : nullptr;
}

}  // namespace

MemoryKind kind_of(const void* data) {
  int is_managed = 0;  // the driver writes one byte or four
  if (get_attribute(CU_POINTER_ATTRIBUTE_IS_MANAGED, data, is_managed) && is_managed != 0) {
    return MemoryKind::kCommon;
  }
  CUmemorytype type{};
  if (get_attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, data, type) && type == CU_MEMORYTYPE_HOST) {
    return MemoryKind::kCommon;
  }
  if (pool_of(data) != nullptr) return MemoryKind::kGranted;
  // Memory from cudaMalloc has the older kind of inter-process handles; mapped memory does not.
  int is_plain = 0;
  if (!get_attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, data, is_plain)) {
    return MemoryKind::kGranted;
  }
  return is_plain != 0 ? MemoryKind::kPlain : MemoryKind::kGranted;
}

bool has_access(int device, const void* data) {
  if (const cudaMemPool_t pool = pool_of(data)) {
    cudaMemLocation location{};
    location.type = cudaMemLocationTypeDevice;
    location.id = device;
    cudaMemAccessFlags flags = cudaMemAccessFlagsProtNone;
    CROSSDOCK_CUDA(cudaMemPoolGetAccess(&flags, pool, &location));
    return flags == cudaMemAccessFlagsProtReadWrite;
  }
  static const auto kGetAccess =
      driver_function<PFN_cuMemGetAccess_v10020>("cuMemGetAccess", 10020);
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  unsigned long long flags = 0;
  const CUresult status = kGetAccess(&flags, &location, address_of(data));
  return status == CUDA_SUCCESS && flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

}  // namespace crossdock::cuda
