#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>

#include "core/cuda/memory_sharing.hpp"
#include "core/descriptor.hpp"

namespace crossdock::cuda {

/// Device memory without an address (the driver's virtual memory management). It is freed once no
/// process holds or maps it, however the processes end.
class PhysicalMemory {
 public:
  /// New memory that can be exported; nullopt if there is not enough.
  /// REQUIRES: num_bytes is a multiple of the granularity; sharing is kDescriptors or kFabric.
  static std::optional<PhysicalMemory> create(int device, int64_t num_bytes, MemorySharing sharing);
  /// Memory that another process has exported; its size is known to the caller.
  static PhysicalMemory import_descriptor(const Descriptor& exported, int64_t num_bytes);
  static PhysicalMemory import_fabric(const CUmemFabricHandle& exported, int64_t num_bytes);
  ~PhysicalMemory();
  PhysicalMemory(PhysicalMemory&& other) noexcept;
  PhysicalMemory& operator=(PhysicalMemory&& other) noexcept;

  int64_t num_bytes() const { return num_bytes_; }
  CUmemGenericAllocationHandle handle() const { return handle_; }

  Descriptor export_descriptor() const;
  CUmemFabricHandle export_fabric() const;

 private:
  PhysicalMemory(CUmemGenericAllocationHandle handle, int64_t num_bytes)
      : handle_(handle), num_bytes_(num_bytes) {}

  CUmemGenericAllocationHandle handle_ = 0;  // 0: none
  int64_t num_bytes_ = 0;
};

/// Sizes of physical memory and of its mappings are multiples of this.
int64_t memory_granularity(int device, MemorySharing sharing);

/// Throws Error(kUnsupported) with the reason if memory of this device cannot be exported in this
/// way; tries it if the driver says that it can.
void check_sharing(int device, MemorySharing sharing);

}  // namespace crossdock::cuda
