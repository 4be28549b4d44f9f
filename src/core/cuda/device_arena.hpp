#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/cuda/stream.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

/// An allocation that memory is part of.
struct MemoryBlock {
  std::byte* base = nullptr;
  int64_t num_bytes = 0;
};

/// Device memory from the driver.
///
/// Kernels of several ranks of one process may be waiting for each other, and the driver must not
/// wait for them while it holds resources that a launch needs. Memory is therefore allocated and
/// freed in a stream of the arena, which never waits for the device: streams share hardware queues,
/// and a wait in one could block the very rank that it waits for. Memory that other processes map
/// cannot be allocated this way; a process with such memory has only one rank.
///
/// Memory that other processes map is never returned to the driver: a peer may keep its mapping,
/// and freeing the memory under it is undefined. It is reused in this process instead, so an
/// address and its inter-process handle mean the same memory until the process ends, and no mapping
/// becomes stale. Thread-safe.
class DeviceArena : public std::enable_shared_from_this<DeviceArena> {
 public:
  /// The arena of this process on the device, shared by all its ranks: streams and pools are
  /// expensive. is_exported: for memory that other processes will map (CUDA IPC).
  static std::shared_ptr<DeviceArena> make(int device, bool is_exported);
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  int device() const { return device_; }
  /// For copies and fills at set-up; nothing in this stream waits for kernels.
  cudaStream_t stream() const { return stream_.get(); }

  /// num_bytes of device memory, 256-byte aligned, ready for use by any stream. Freed with its last
  /// owner, after `last_use` if that has been recorded. REQUIRES: by then, all work that uses it
  /// has finished or precedes last_use.
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
  std::vector<Unused> unused_;  // if exported: to be reused; else: still in use by the device
};

/// Memory for long-lived objects; steps use a DevicePool.
Buffer allocate_device(DeviceArena& arena, int64_t num_bytes);

}  // namespace crossdock::cuda
