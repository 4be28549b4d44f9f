#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/block_ledger.hpp"
#include "core/cuda/stream.hpp"
#include "core/descriptor.hpp"
#include "crossdock/tensor.hpp"

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

/// An allocation from the driver.
struct MemoryBlock {
  std::byte* base = nullptr;
  int64_t num_bytes = 0;
};

/// A block that its owner has released; the device may still be using it.
struct UnusedBlock {
  MemoryBlock block;
  std::shared_ptr<OwnedEvent> last_use;
  bool is_done() const { return !last_use || last_use->has_passed(); }
};

/// Device memory from the driver.
///
/// Kernels of several ranks of one process may be waiting for each other, and the driver must not
/// wait for them while it holds resources that a launch needs. Memory that stays in this process
/// (kNone) is therefore allocated and freed in a stream of the arena, which never waits for the
/// device: streams share hardware queues, and a wait in one could block the very rank that it waits
/// for. A process whose memory other processes map has only one rank.
///
/// Memory that other processes map is never returned to the driver: a peer may keep its mapping. It
/// is reused in this process instead, so an address always means the same memory and no mapping
/// becomes stale. Thread-safe.
class DeviceArena : public std::enable_shared_from_this<DeviceArena> {
 public:
  /// The arena of this process on the device, shared by all its ranks: streams and pools are
  /// expensive. With kDescriptors and kFabric it is a RangeArena.
  static std::shared_ptr<DeviceArena> make(int device, MemorySharing sharing);
  virtual ~DeviceArena() = default;
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  int device() const { return device_; }
  /// For copies and fills during setup; nothing in this stream waits for kernels.
  cudaStream_t stream() const { return stream_.get(); }

  /// num_bytes of device memory, 256-byte aligned, ready for use by any stream. Freed with its last
  /// owner, after `last_use` if it has been recorded. REQUIRES: by then, all work that uses it has
  /// finished or precedes last_use.
  std::shared_ptr<void> allocate(int64_t num_bytes, std::shared_ptr<OwnedEvent> last_use = {});

 protected:
  explicit DeviceArena(int device) : device_(device), stream_(device) {}

 private:
  /// At least num_bytes. Throws if there is not enough memory.
  virtual MemoryBlock take(int64_t num_bytes) = 0;
  /// Called with the result of take, also by destructors and during graph capture.
  virtual void give_back(const UnusedBlock& unused) = 0;

  int device_;
  OwnedStream stream_;
};

/// Memory for long-lived objects; steps use a DevicePool.
Buffer allocate_device(DeviceArena& arena, int64_t num_bytes);

/// An arena of contiguous addresses, which other processes map as a whole: memory is at the same
/// offset in all of them. It grows at its end, by chunks of physical memory, and never shrinks.
/// Growing does not wait for the device.
class RangeArena final : public DeviceArena {
 public:
  /// The arena of this process on the device. REQUIRES: sharing is kDescriptors or kFabric.
  static std::shared_ptr<RangeArena> make(int device, MemorySharing sharing);
  RangeArena(int device, MemorySharing sharing);

  MemorySharing sharing() const { return sharing_; }
  std::byte* base() const { return range_.base(); }
  /// Maximum size in bytes.
  int64_t capacity() const { return range_.capacity(); }

  /// Current size in bytes; never shrinks.
  int64_t num_bytes() const { return filled_bytes_; }
  /// The sizes of its chunks, at least one.
  std::vector<int64_t> chunks() const;
  /// A descriptor of a chunk for other processes. REQUIRES: sharing is kDescriptors.
  Descriptor export_descriptor(size_t chunk) const;
  /// A handle of a chunk for other processes. REQUIRES: sharing is kFabric.
  CUmemFabricHandle export_fabric(size_t chunk) const;

 private:
  MemoryBlock take(int64_t num_bytes) override;
  void give_back(const UnusedBlock& unused) override;
  void grow(int64_t needed_bytes, int64_t ample_bytes);

  MemorySharing sharing_;
  int64_t granularity_;
  mutable std::mutex mutex_;
  MappedRange range_;
  std::atomic<int64_t> filled_bytes_ = 0;  // of range_
  FreeRanges free_;
  std::vector<UnusedBlock> unused_;  // not free until the device has finished with them
};

}  // namespace crossdock::cuda
