#include "comm/cuda/memory_access.hpp"

#include <cuda_runtime.h>

#include "core/cuda/check.hpp"

namespace crossdock::cuda {
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
