#include "core/cuda/device.hpp"

#include "core/check.hpp"
#include "core/cuda/check.hpp"

namespace crossdock::cuda {

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

int num_sms(int device) {
  int count = 0;
  CROSSDOCK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

void enable_peer_access(int device, int peer) {
  if (device == peer) return;
  int possible = 0;
  CROSSDOCK_CUDA(cudaDeviceCanAccessPeer(&possible, device, peer));
  if (possible == 0) {
    throw Error(ErrorCode::kUnsupported, concat("GPU ", device, " cannot reach the memory of GPU ",
                                                peer, "; use another strategy than direct"));
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

RelaxedCapture::RelaxedCapture()
    : is_relaxed_(cudaThreadExchangeStreamCaptureMode(&previous_) == cudaSuccess) {}

RelaxedCapture::~RelaxedCapture() {
  if (is_relaxed_) cudaThreadExchangeStreamCaptureMode(&previous_);
}

}  // namespace crossdock::cuda
