#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/cuda/device_arena.hpp"
#include "core/cuda/mapped_range.hpp"
#include "core/free_ranges.hpp"

namespace crossdock::cuda {

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
