#pragma once

#include <cuda_runtime.h>

#include <mutex>

#include "core/cuda/device.hpp"
#include "core/cuda/device_pool.hpp"
#include "core/cuda/stream.hpp"
#include "core/tensor_memory.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cuda {

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
