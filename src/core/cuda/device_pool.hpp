#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "core/cuda/device.hpp"
#include "core/cuda/device_arena.hpp"
#include "core/cuda/stream.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

/// Page-locked host memory with unspecified contents, which the device copies to and from without
/// staging in the driver. After its last owner it is kept for later leases: page-locking is slow
/// and may wait for the device. Thread-safe.
Buffer lease_pinned_memory(int64_t num_bytes);

/// Bytes in one lease of host words.
inline constexpr int64_t kHostWordBytes = 128;

/// kHostWordBytes of zeroed, page-locked host memory that kernels on all devices can read and
/// write. Does not wait for a device, except for the first lease of a process: page-locked memory
/// cannot be allocated or freed while kernels wait for each other, so a process keeps and reuses
/// it.
Buffer lease_host_words();

/// Device memory that is reused instead of being freed, so steps neither allocate nor wait.
/// Thread-safe. Buffers may outlive the pool.
///
/// A buffer is taken for the work of one stream. Once released, it can be taken again for the same
/// stream without a wait; if it is taken for another stream, that stream waits for the work queued
/// at the release. REQUIRES: the stream lives until its buffers are released and is not
/// cudaStreamPerThread, which is a different stream on the releasing thread. Memory taken while the
/// stream is captured must be kept until the last replay of the graph has finished.
class DevicePool {
 public:
  explicit DevicePool(std::shared_ptr<DeviceArena> arena);
  ~DevicePool();
  DevicePool(const DevicePool&) = delete;
  DevicePool& operator=(const DevicePool&) = delete;

  DeviceArena& arena() const;
  Buffer take(int64_t num_bytes, cudaStream_t stream);

  /// This stream lives until another one is set or the pool is destroyed. A release in it is
  /// recorded only when another stream takes the buffer, which saves most of the cost of a release.
  void set_lasting_stream(cudaStream_t stream);

  /// Buffers taken from now on are used in the threads' own streams, for which the stream of `take`
  /// stands in (see CallersStream): it waits for the stream of the thread that releases a buffer.
  void follow_threads(bool are_followed);

  /// The allocation of memory that was taken from this pool; nullopt for other memory.
  std::optional<MemoryBlock> find(const void* data) const;

  /// Owner of the buffer that contains this address and was taken from any pool of this process;
  /// null for other memory.
  static std::shared_ptr<const void> owner_of(const void* data);

  /// Keeps all memory of the pool alive, in use or free.
  std::shared_ptr<const void> memory() const;

  /// Bytes in use / bytes held (in use or free).
  int64_t bytes_in_use() const;
  int64_t bytes_held() const;

 private:
  struct State;
  struct AllPools;
  static AllPools& all_pools();

  std::shared_ptr<State> state_;
};

/// State for the calls of an object that queues work on one GPU: their memory and the caller's
/// stream.
class DeviceCalls {
 public:
  explicit DeviceCalls(int device)
      : device_(device), callers_(device), pool_(DeviceArena::make(device, MemorySharing::kNone)) {}

  int device() const { return device_; }

 private:
  friend class DeviceCall;

  int device_;
  std::mutex mutex_;
  CallersStream callers_;
  DevicePool pool_;
};

/// Surrounds every call: makes the GPU current and orders the work in the caller's stream. Queueing
/// takes microseconds, so calls from several threads take turns.
///
/// Memory returns to the pool when it is released; the pool hands it out again in the order of the
/// stream. If the call is captured, it stays with the graph.
class DeviceCall {
 public:
  DeviceCall(DeviceCalls& calls, Stream stream)
      : lock_(calls.mutex_), guard_(calls.device_), callers_(calls.callers_), pool_(calls.pool_) {
    callers_.set(handle_of(stream));
    pool_.follow_threads(callers_.is_per_thread());
    callers_.follow_thread();
  }
  ~DeviceCall() { callers_.lead_thread(); }
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  cudaStream_t handle() const { return callers_.get(); }
  Stream stream() const { return {callers_.get()}; }

  Buffer take(int64_t num_bytes) const { return pool_.take(num_bytes, handle()); }
  OwnedTensor take(DType dtype, const Shape& shape) const {
    return owned_tensor(take(shape.num_elements() * size_of(dtype)), dtype, shape);
  }

 private:
  std::lock_guard<std::mutex> lock_;
  CallGuard guard_;
  CallersStream& callers_;
  DevicePool& pool_;
};

}  // namespace crossdock::cuda
