#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/cuda/stream.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

/// Where a piece of memory lies in the allocation that it is part of.
struct MemoryBlock {
  std::byte* base = nullptr;
  int64_t num_bytes = 0;
};

/// Device memory from the driver.
///
/// Kernels of several ranks of one process may be waiting for each other, and the driver must not
/// wait for them while it holds what a launch needs. So memory is allocated and freed in the order
/// of a stream of the arena's own, which never waits for the device: streams share hardware queues,
/// and what waits in one could hold up the rank that it waits for. Memory that other processes map
/// cannot come that way; a process with such memory holds one rank.
///
/// Memory that other processes map never goes back to the driver: a peer may keep its mapping, and
/// freeing the memory under it is undefined. It is handed out again in this process instead, so an
/// address and its inter-process handle mean the same memory until the process ends, and no mapping
/// becomes stale. Thread-safe.
class DeviceArena : public std::enable_shared_from_this<DeviceArena> {
 public:
  /// The one arena of this process on the device, for all its ranks: streams and pools are costly.
  /// is_exported: the one for memory that other processes will map (CUDA IPC).
  static std::shared_ptr<DeviceArena> make(int device, bool is_exported);
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  int device() const { return device_; }
  /// Nothing waits for kernels in this stream: for copies and fills while things are set up.
  cudaStream_t stream() const { return stream_.get(); }

  /// num_bytes of device memory, 256-byte aligned, ready for use by any stream. Freed with its last
  /// owner, after `last_use` if that is set by then. REQUIRES: work that uses it and is not before
  /// last_use has finished by then.
  std::shared_ptr<void> allocate(int64_t num_bytes, std::shared_ptr<OwnedEvent> last_use = {});

 private:
  DeviceArena(int device, bool is_exported);
  MemoryBlock take_exported(int64_t num_bytes);
  /// The smallest unused block of a size in [least_bytes, most_bytes]; an empty one if there is
  /// none.
  MemoryBlock take_unused(int64_t least_bytes, int64_t most_bytes);
  void free(const MemoryBlock& block, const std::shared_ptr<OwnedEvent>& last_use);
  void free_unused();

  int device_;
  bool is_exported_;
  OwnedStream stream_;
  cudaMemPool_t pool_ = nullptr;  // null if exported

  struct Unused {
    MemoryBlock block;
    std::shared_ptr<OwnedEvent> last_use;
    bool is_done() const { return !last_use || last_use->has_passed(); }
  };
  std::mutex mutex_;
  std::vector<Unused> unused_;  // if exported: to hand out again; else: in use by the device still
};

/// Memory that lives as long as its user; steps take from a DevicePool.
Buffer allocate_device(DeviceArena& arena, int64_t num_bytes);

}  // namespace crossdock::cuda
