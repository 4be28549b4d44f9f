#include "core/cuda/callers_stream.hpp"

#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

// Does not throw; a stream that cannot be queried counts as captured.
bool may_be_captured(cudaStream_t stream) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

}  // namespace

void CallersStream::set(cudaStream_t stream) {
  // Like a thread's own stream, the stand-in is ordered with the device's default stream.
  if (stream == cudaStreamPerThread && !stand_in_) {
    stand_in_ = lease_stream(device_, /*waits_for_default=*/true);
  }
  is_per_thread_ = stream == cudaStreamPerThread;
  stream_ = stream;
}

void CallersStream::follow_thread() const {
  if (!is_per_thread_) return;
  handover_.record(cudaStreamPerThread);
  handover_.make_wait(stand_in_->get());
}

void CallersStream::lead_thread() const noexcept {
  if (!is_per_thread_) return;
  // A call that was refused early may have left the stand-in outside a capture.
  if (may_be_captured(cudaStreamPerThread) != may_be_captured(stand_in_->get())) return;
  if (cudaEventRecord(handover_.get(), stand_in_->get()) != cudaSuccess) return;
  cudaStreamWaitEvent(cudaStreamPerThread, handover_.get(), 0);
}

bool wait_for_thread(cudaStream_t stream, const OwnedEvent& event) noexcept {
  if (may_be_captured(cudaStreamPerThread) || may_be_captured(stream)) return false;
  return cudaEventRecord(event.get(), cudaStreamPerThread) == cudaSuccess &&
         cudaStreamWaitEvent(stream, event.get(), 0) == cudaSuccess;
}

}  // namespace crossdock::cuda
