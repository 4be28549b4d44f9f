#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <new>

namespace crossdock::cuda {

/// Makes `device` the calling thread's current one, and restores the old one at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  /// For destructors: goes on where the process is ending.
  DeviceGuard(int device, std::nothrow_t) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

/// The calling thread's current device; throws where there is none.
int current_device();

/// Multiprocessors of a device.
int num_sms(int device);

/// Bytes of shared memory that a block on a device may have.
int64_t shared_memory_per_block(int device);

/// For tests: until the end of the scope no device has more shared memory per block than this.
class SharedMemoryLimit {
 public:
  explicit SharedMemoryLimit(int64_t bytes);
  ~SharedMemoryLimit();
  SharedMemoryLimit(const SharedMemoryLimit&) = delete;
  SharedMemoryLimit& operator=(const SharedMemoryLimit&) = delete;
};

/// Lets kernels on `device` use memory of `peer`; nothing to do if they are one.
/// Throws Error(kUnsupported) if the two cannot reach each other.
void enable_peer_access(int device, int peer);

/// Whether work given to this stream now goes into a graph instead of being run.
bool is_capturing(cudaStream_t stream);

/// A number of the capture that this stream is part of, no other capture's; 0 if it is not
/// captured.
uint64_t capture_id(cudaStream_t stream);

/// Until the end of the scope this thread may make calls that a graph capture, its own or another
/// thread's, would otherwise forbid and be invalidated by: allocation, mapping, waiting for streams
/// that are not captured.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode previous_ = cudaStreamCaptureModeRelaxed;
  bool is_relaxed_;  // not where the process is ending
};

/// Every call of a user that reaches the CUDA runtime begins with one: the device is current, and a
/// capture under way anywhere in the process (PyTorch captures in global mode) does not matter.
class CallGuard {
 public:
  explicit CallGuard(int device) : device_(device) {}

 private:
  DeviceGuard device_;
  RelaxedCapture relaxed_;
};

}  // namespace crossdock::cuda
