#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <new>

namespace crossdock::cuda {

/// Throws Error(kCuda) with the name of the call; kUnsupported if there is no GPU or no driver.
[[noreturn]] void throw_error(cudaError_t status, const char* call);

inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw_error(status, call);
}

/// The address of a function of the CUDA driver, as of CUDA `version` (12.3: 12030). The runtime is
/// linked, the driver's library is not: its functions are looked up by name. Throws
/// Error(kUnsupported) if the driver is too old.
void* find_driver_function(const char* name, unsigned version);

template <typename Function>
Function driver_function(const char* name, unsigned version) {
  return reinterpret_cast<Function>(find_driver_function(name, version));
}

/// Errors of the driver and of the runtime have the same numbers.
inline void check(CUresult status, const char* call) {
  check(static_cast<cudaError_t>(status), call);
}

}  // namespace crossdock::cuda

/// For every call of the CUDA runtime whose failure matters, and as
/// CROSSDOCK_CUDA(cudaGetLastError()) after each launch.
#define CROSSDOCK_CUDA(call) ::crossdock::cuda::check((call), #call)

namespace crossdock::cuda {

/// Makes `device` the calling thread's current device, and restores the previous one at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  /// For destructors: ignores errors, which are normal during process exit.
  DeviceGuard(int device, std::nothrow_t) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

/// The calling thread's current device; throws if there is none.
int current_device();

/// Number of GPUs visible to this process.
int num_devices();

/// `device`, the index of a tensor's GPU; throws Error(kInvalidArgument) if there is no such GPU.
int existing_device(int device);

/// Number of SMs of a device.
int num_sms(int device);
/// Major compute capability of a device: 9 for Hopper.
int compute_capability(int device);

/// Maximum bytes of shared memory per block on a device.
int64_t shared_memory_per_block(int device);

/// Allows kernels on `device` to use memory of `peer`; does nothing if they are the same device.
/// Throws Error(kUnsupported) if the two cannot reach each other.
void enable_peer_access(int device, int peer);

/// Whether work submitted to this stream is captured in a graph instead of being run.
bool is_capturing(cudaStream_t stream);

/// The unique number of the capture that this stream is part of; 0 if it is not captured.
uint64_t capture_id(cudaStream_t stream);

/// Until the end of the scope this thread may make calls that a graph capture, on this or another
/// thread, would otherwise forbid and be invalidated by: allocation, mapping, waiting for streams
/// that are not captured.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode previous_ = cudaStreamCaptureModeRelaxed;
  bool is_relaxed_;  // false during process exit
};

/// Every user call that reaches the CUDA runtime begins with one: it makes the device current, and
/// permits captures elsewhere in the process (PyTorch captures in global mode).
class CallGuard {
 public:
  explicit CallGuard(int device) : device_(device) {}

 private:
  DeviceGuard device_;
  RelaxedCapture relaxed_;
};

}  // namespace crossdock::cuda
