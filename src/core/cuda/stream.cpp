#include "core/cuda/stream.hpp"

#include <algorithm>
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
  const auto idle = std::find_if(free.rbegin(), free.rend(),
                                 [](const auto& candidate) { return candidate->is_idle(); });
  std::unique_ptr<OwnedStream> stream;
  if (idle == free.rend()) {
    stream = std::make_unique<OwnedStream>(device);
  } else {
    stream = std::move(*idle);
    free.erase(std::next(idle).base());
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

bool OwnedStream::is_idle() const {
  const RelaxedCapture relaxed;
  const cudaError_t status = cudaStreamQuery(stream_);
  if (status != cudaSuccess) cudaGetLastError();  // "not ready" is no error
  return status == cudaSuccess;
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
