#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/cuda/physical_memory.hpp"

namespace crossdock::cuda {

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
