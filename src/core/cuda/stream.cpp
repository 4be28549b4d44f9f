#include "core/cuda/stream.hpp"

#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {

OwnedStream::OwnedStream(int device) {
  const DeviceGuard guard(device);
  CROSSDOCK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

OwnedStream::~OwnedStream() {
  cudaStreamDestroy(stream_);
}

void OwnedStream::synchronize() const {
  CROSSDOCK_CUDA(cudaStreamSynchronize(stream_));
}

OwnedEvent::OwnedEvent(int device) {
  const DeviceGuard guard(device);
  CROSSDOCK_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}

OwnedEvent::~OwnedEvent() {
  cudaEventDestroy(event_);
}

void OwnedEvent::record(cudaStream_t stream) const {
  CROSSDOCK_CUDA(cudaEventRecord(event_, stream));
}

void OwnedEvent::make_wait(cudaStream_t stream) const {
  CROSSDOCK_CUDA(cudaStreamWaitEvent(stream, event_, 0));
}

}  // namespace crossdock::cuda
