#include "core/cuda/stream.hpp"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/cuda/check.hpp"
#include "core/cuda/device.hpp"

namespace crossdock::cuda {
namespace {

struct FreeStreams {
  std::mutex mutex;
  std::map<int, std::vector<std::unique_ptr<OwnedStream>>> of_device;
};

// Never destroyed: leases may outlive static objects.
FreeStreams& free_streams() {
  static auto* const kInstance = new FreeStreams;
  return *kInstance;
}

}  // namespace

std::shared_ptr<const OwnedStream> lease_stream(int device) {
  FreeStreams& all = free_streams();
  const std::lock_guard lock(all.mutex);
  std::vector<std::unique_ptr<OwnedStream>>& free = all.of_device[device];
  std::unique_ptr<OwnedStream> stream;
  if (free.empty()) {
    stream = std::make_unique<OwnedStream>(device);
  } else {
    stream = std::move(free.back());
    free.pop_back();
  }
  const auto give_back = [device](const OwnedStream* used) {
    FreeStreams& owner = free_streams();
    const std::lock_guard again(owner.mutex);
    owner.of_device[device].emplace_back(const_cast<OwnedStream*>(used));
  };
  return {stream.release(), give_back};
}

OwnedStream::OwnedStream(int device) {
  const CallGuard guard(device);
  CROSSDOCK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

OwnedStream::~OwnedStream() {
  const RelaxedCapture relaxed;
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

bool OwnedEvent::has_passed() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) cudaGetLastError();  // which is no error
  return status != cudaErrorNotReady;
}

void OwnedEvent::make_wait(cudaStream_t stream) const {
  CROSSDOCK_CUDA(cudaStreamWaitEvent(stream, event_, 0));
}

}  // namespace crossdock::cuda
