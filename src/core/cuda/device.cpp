#include "core/cuda/device.hpp"

#include <array>
#include <atomic>

#include "core/check.hpp"

namespace crossdock::cuda {

void throw_error(cudaError_t status, const char* call) {
  cudaGetLastError();  // a non-sticky error must not reappear at the next call
  const bool no_device = status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver ||
                         status == cudaErrorInitializationError || status == cudaErrorStubLibrary;
  if (no_device) {
    throw Error(ErrorCode::kUnsupported,
                concat("no CUDA device: ", cudaGetErrorString(status),
                       "; CUDA tensors need a machine with an NVIDIA GPU and its driver"));
  }
  throw Error(ErrorCode::kCuda,
              concat(call, ": ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"));
}

void* find_driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  CROSSDOCK_CUDA(
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) {
    throw Error(ErrorCode::kUnsupported,
                concat("the CUDA driver must have ", name, "; install a newer one"));
  }
  return function;
}

namespace {

// An attribute of each device, never 0. Cached, as every launch asks for it.
class AttributeCache {
 public:
  explicit AttributeCache(cudaDeviceAttr attribute) : attribute_(attribute) {}

  int of(int device) {
    const auto place = static_cast<size_t>(device);
    if (place < values_.size() && values_[place] != 0) return values_[place];
    int value = 0;
    CROSSDOCK_CUDA(cudaDeviceGetAttribute(&value, attribute_, device));
    if (place < values_.size()) values_[place] = value;
    return value;
  }

 private:
  cudaDeviceAttr attribute_;
  std::array<std::atomic<int>, 64> values_{};
};

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  CROSSDOCK_CUDA(cudaGetDevice(&previous_));
  if (previous_ != device) CROSSDOCK_CUDA(cudaSetDevice(device));
}

DeviceGuard::DeviceGuard(int device, std::nothrow_t) noexcept {
  if (cudaGetDevice(&previous_) != cudaSuccess) previous_ = device;
  if (previous_ != device) cudaSetDevice(device);
}

DeviceGuard::~DeviceGuard() {
  cudaSetDevice(previous_);
}

int current_device() {
  int device = 0;
  CROSSDOCK_CUDA(cudaGetDevice(&device));
  return device;
}

int num_devices() {
  int count = 0;
  CROSSDOCK_CUDA(cudaGetDeviceCount(&count));
  return count;
}

int existing_device(int device) {
  const int count = num_devices();
  CROSSDOCK_CHECK(device >= 0 && device < count, "the tensors are on GPU ", device,
                  ", but the number of GPUs is ", count);
  return device;
}

int num_sms(int device) {
  static AttributeCache cache(cudaDevAttrMultiProcessorCount);
  return cache.of(device);
}

int compute_capability(int device) {
  static AttributeCache cache(cudaDevAttrComputeCapabilityMajor);
  return cache.of(device);
}

int64_t shared_memory_per_block(int device) {
  int bytes = 0;
  CROSSDOCK_CUDA(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

void enable_peer_access(int device, int peer) {
  if (device == peer) return;
  int possible = 0;
  CROSSDOCK_CUDA(cudaDeviceCanAccessPeer(&possible, device, peer));
  if (possible == 0) {
    throw Error(ErrorCode::kUnsupported,
                concat("GPU ", device, " cannot reach the memory of GPU ", peer));
  }
  const DeviceGuard guard(device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
    return;
  }
  CROSSDOCK_CUDA(status);
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CROSSDOCK_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

uint64_t capture_id(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  CROSSDOCK_CUDA(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

RelaxedCapture::RelaxedCapture()
    : is_relaxed_(cudaThreadExchangeStreamCaptureMode(&previous_) == cudaSuccess) {}

RelaxedCapture::~RelaxedCapture() {
  if (is_relaxed_) cudaThreadExchangeStreamCaptureMode(&previous_);
}

}  // namespace crossdock::cuda
