#include "core/cuda/physical_memory.hpp"

#include <utility>

#include "core/check.hpp"
#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

CUmemAllocationHandleType handle_type(MemorySharing sharing) {
  CROSSDOCK_ASSERT(sharing == MemorySharing::kDescriptors || sharing == MemorySharing::kFabric);
  return sharing == MemorySharing::kFabric ? CU_MEM_HANDLE_TYPE_FABRIC
                                           : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUmemAllocationProp properties(int device, MemorySharing sharing) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.requestedHandleTypes = handle_type(sharing);
  wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  wanted.location.id = device;
  return wanted;
}

void export_handle(const PhysicalMemory& memory, CUmemAllocationHandleType type, void* exported) {
  static const auto kExport = driver_function<PFN_cuMemExportToShareableHandle_v10020>(
      "cuMemExportToShareableHandle", 10020);
  CROSSDOCK_CUDA(kExport(exported, memory.handle(), type, 0));
}

CUmemGenericAllocationHandle import_handle(void* exported, CUmemAllocationHandleType type) {
  static const auto kImport = driver_function<PFN_cuMemImportFromShareableHandle_v10020>(
      "cuMemImportFromShareableHandle", 10020);
  CUmemGenericAllocationHandle handle = 0;
  CROSSDOCK_CUDA(kImport(&handle, exported, type));
  return handle;
}

bool has_attribute(int device, CUdevice_attribute attribute) {
  static const auto kGet =
      driver_function<PFN_cuDeviceGetAttribute_v2000>("cuDeviceGetAttribute", 2000);
  int value = 0;
  // A driver that does not know the attribute does not have the feature.
  return kGet(&value, attribute, device) == CUDA_SUCCESS && value != 0;
}

}  // namespace

std::optional<PhysicalMemory> PhysicalMemory::create(int device, int64_t num_bytes,
                                                     MemorySharing sharing) {
  static const auto kCreate = driver_function<PFN_cuMemCreate_v10020>("cuMemCreate", 10020);
  const CUmemAllocationProp wanted = properties(device, sharing);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult status = kCreate(&handle, static_cast<size_t>(num_bytes), &wanted, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) return std::nullopt;
  check(status, "cuMemCreate");
  return PhysicalMemory(handle, num_bytes);
}

PhysicalMemory PhysicalMemory::import_descriptor(const Descriptor& exported, int64_t num_bytes) {
  const auto value = static_cast<intptr_t>(exported.number());
  auto* const number = reinterpret_cast<void*>(value);  // NOLINT: as the driver takes it
  return {import_handle(number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), num_bytes};
}

PhysicalMemory PhysicalMemory::import_fabric(const CUmemFabricHandle& exported, int64_t num_bytes) {
  CUmemFabricHandle handle = exported;
  return {import_handle(&handle, CU_MEM_HANDLE_TYPE_FABRIC), num_bytes};
}

PhysicalMemory::PhysicalMemory(PhysicalMemory&& other) noexcept
    : handle_(std::exchange(other.handle_, 0)), num_bytes_(other.num_bytes_) {}

PhysicalMemory& PhysicalMemory::operator=(PhysicalMemory&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

PhysicalMemory::~PhysicalMemory() {
  if (handle_ == 0) return;
  static const auto kRelease = driver_function<PFN_cuMemRelease_v10020>("cuMemRelease", 10020);
  kRelease(handle_);
}

Descriptor PhysicalMemory::export_descriptor() const {
  int number = -1;
  export_handle(*this, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, &number);
  return Descriptor(number);
}

CUmemFabricHandle PhysicalMemory::export_fabric() const {
  CUmemFabricHandle exported{};
  export_handle(*this, CU_MEM_HANDLE_TYPE_FABRIC, &exported);
  return exported;
}

int64_t memory_granularity(int device, MemorySharing sharing) {
  static const auto kGet = driver_function<PFN_cuMemGetAllocationGranularity_v10020>(
      "cuMemGetAllocationGranularity", 10020);
  const CUmemAllocationProp wanted = properties(device, sharing);
  size_t granularity = 0;
  CROSSDOCK_CUDA(kGet(&granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  return static_cast<int64_t>(granularity);
}

void check_sharing(int device, MemorySharing sharing) {
  const bool is_fabric = sharing == MemorySharing::kFabric;
  const char* name = is_fabric ? "fabric handles" : "file descriptors";
  const CUdevice_attribute wanted =
      is_fabric ? CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
                : CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
  if (!has_attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) ||
      !has_attribute(device, wanted)) {
    throw Error(ErrorCode::kUnsupported,
                concat("GPU ", device, " or its driver cannot share memory by ", name));
  }
  try {  // fabric handles also need a fabric channel; only an attempt shows whether there is one
    const std::optional<PhysicalMemory> memory =
        PhysicalMemory::create(device, memory_granularity(device, sharing), sharing);
    if (memory && is_fabric) memory->export_fabric();
    if (memory && !is_fabric) memory->export_descriptor();
  } catch (const Error& error) {
    throw Error(ErrorCode::kUnsupported,
                concat("GPU ", device, " cannot share memory by ", name, ": ", error.what()));
  }
}

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
