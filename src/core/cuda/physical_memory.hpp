#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/descriptor.hpp"

namespace crossdock::cuda {

/// How other processes map the memory of an arena.
enum class MemorySharing : uint8_t {
  kNone,         // they cannot
  kDescriptors,  // virtual memory, through file descriptors
  kFabric,       // virtual memory, through fabric handles
  kIpc,          // allocations of cudaMalloc, through cudaIpc
};

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

/// A range of addresses, filled from its beginning with physical memory that kernels on one device
/// can use. Addresses that are filled never move.
class MappedRange {
 public:
  /// Reserves the addresses, which takes no memory. REQUIRES: capacity is a multiple of the
  /// granularity.
  MappedRange(int device, int64_t capacity);
  /// Unmaps all memory. REQUIRES: no kernel uses it.
  ~MappedRange();
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;

  std::byte* base() const { return base_; }
  int64_t capacity() const { return capacity_; }
  int64_t num_bytes() const { return num_bytes_; }  // filled
  const std::vector<PhysicalMemory>& chunks() const { return chunks_; }

  /// Maps memory after what is already there. Does not wait for the device.
  /// REQUIRES: it fits into the capacity.
  void append(PhysicalMemory memory);

 private:
  int device_;
  int64_t capacity_;
  std::byte* base_ = nullptr;
  int64_t num_bytes_ = 0;
  std::vector<PhysicalMemory> chunks_;
};

}  // namespace crossdock::cuda
