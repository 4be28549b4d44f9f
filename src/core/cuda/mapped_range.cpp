#include "core/cuda/mapped_range.hpp"

#include <utility>

#include "core/check.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/driver.hpp"

namespace crossdock::cuda {
namespace {

CUdeviceptr address_of(const std::byte* data) {
  return reinterpret_cast<CUdeviceptr>(data);
}

void unmap(const std::byte* data, int64_t num_bytes) {
  static const auto kUnmap = driver_function<PFN_cuMemUnmap_v10020>("cuMemUnmap", 10020);
  kUnmap(address_of(data), static_cast<size_t>(num_bytes));
}

}  // namespace

MappedRange::MappedRange(int device, int64_t capacity) : device_(device), capacity_(capacity) {
  static const auto kReserve =
      driver_function<PFN_cuMemAddressReserve_v10020>("cuMemAddressReserve", 10020);
  CUdeviceptr base = 0;
  CROSSDOCK_CUDA(kReserve(&base, static_cast<size_t>(capacity), 0, 0, 0));
  base_ = reinterpret_cast<std::byte*>(base);  // NOLINT: the driver's type for addresses
}

MappedRange::~MappedRange() {
  static const auto kFree = driver_function<PFN_cuMemAddressFree_v10020>("cuMemAddressFree", 10020);
  const DeviceGuard guard(device_, std::nothrow);
  const RelaxedCapture relaxed;
  int64_t offset = 0;
  for (const PhysicalMemory& chunk : chunks_) {
    unmap(base_ + offset, chunk.num_bytes());
    offset += chunk.num_bytes();
  }
  kFree(address_of(base_), static_cast<size_t>(capacity_));
}

void MappedRange::append(PhysicalMemory memory) {
  static const auto kMap = driver_function<PFN_cuMemMap_v10020>("cuMemMap", 10020);
  static const auto kSetAccess =
      driver_function<PFN_cuMemSetAccess_v10020>("cuMemSetAccess", 10020);
  const int64_t added = memory.num_bytes();
  CROSSDOCK_ASSERT(num_bytes_ + added <= capacity_);
  const CUdeviceptr end = address_of(base_ + num_bytes_);
  chunks_.reserve(chunks_.size() + 1);
  CROSSDOCK_CUDA(kMap(end, static_cast<size_t>(added), 0, memory.handle(), 0));
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device_;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult status = kSetAccess(end, static_cast<size_t>(added), &access, 1);
  if (status != CUDA_SUCCESS) {
    unmap(base_ + num_bytes_, added);
    check(status, "cuMemSetAccess");
  }
  chunks_.push_back(std::move(memory));
  num_bytes_ += added;
}

}  // namespace crossdock::cuda
