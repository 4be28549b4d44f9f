#include "core/cuda/stream.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/cuda/device.hpp"
#include "crossdock/cuda.hpp"

namespace crossdock::cuda {
namespace {

struct FreeStreams {
  std::mutex mutex;
  // By device and waits_for_default.
  std::map<std::pair<int, bool>, std::vector<std::unique_ptr<OwnedStream>>> of_kind;
};

// Never destroyed: leases may outlive static objects.
FreeStreams& free_streams() {
  static auto* const kInstance = new FreeStreams;
  return *kInstance;
}

}  // namespace

std::shared_ptr<const OwnedStream> lease_stream(int device, bool waits_for_default) {
  FreeStreams& all = free_streams();
  const std::lock_guard lock(all.mutex);
  const std::pair kind(device, waits_for_default);
  std::vector<std::unique_ptr<OwnedStream>>& free = all.of_kind[kind];
  const auto idle = std::find_if(free.rbegin(), free.rend(),
                                 [](const auto& candidate) { return candidate->is_idle(); });
  std::unique_ptr<OwnedStream> stream;
  if (idle == free.rend()) {
    stream = std::make_unique<OwnedStream>(device, waits_for_default);
  } else {
    stream = std::move(*idle);
    free.erase(std::next(idle).base());
  }
  const auto give_back = [kind](const OwnedStream* used) {
    FreeStreams& owner = free_streams();
    const std::lock_guard again(owner.mutex);
    owner.of_kind[kind].emplace_back(const_cast<OwnedStream*>(used));
  };
  return {stream.release(), give_back};
}

OwnedStream::OwnedStream(int device, bool waits_for_default) {
  const CallGuard guard(device);
  const unsigned flags = waits_for_default ? cudaStreamDefault : cudaStreamNonBlocking;
  CROSSDOCK_CUDA(cudaStreamCreateWithFlags(&stream_, flags));
}

OwnedStream::~OwnedStream() {
  const RelaxedCapture relaxed;
  cudaStreamDestroy(stream_);
}

bool OwnedStream::is_idle() const {
  const RelaxedCapture relaxed;
  const cudaError_t status = cudaStreamQuery(stream_);
  if (status != cudaSuccess) cudaGetLastError();  // "not ready" is not an error
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
  if (status == cudaErrorNotReady) cudaGetLastError();  // not an error
  return status != cudaErrorNotReady;
}

void OwnedEvent::make_wait(cudaStream_t stream) const {
  CROSSDOCK_CUDA(cudaStreamWaitEvent(stream, event_, 0));
}

}  // namespace crossdock::cuda

namespace crossdock {

void make_stream_wait(Stream waiting, Stream awaited, Device device) {
  const cuda::CallGuard guard(device.index);
  const cuda::OwnedEvent event(device.index);
  event.record(cuda::handle_of(awaited));
  event.make_wait(cuda::handle_of(waiting));
  if (waiting.handle == nullptr) event.make_wait(cudaStreamPerThread);
}

}  // namespace crossdock

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

WaitingRoom& WaitingRoom::of(int device) {
  // Never destroyed: rooms may be given back by static objects.
  static auto* mutex = new std::mutex;
  static auto* rooms = new std::map<int, WaitingRoom>;
  const std::lock_guard lock(*mutex);
  return rooms->try_emplace(device, num_sms(device)).first->second;
}

std::shared_ptr<const void> WaitingRoom::take(const Request& request) {
  const std::lock_guard lock(mutex_);
  const auto remove = [this, stream_id = request.stream_id](auto taken) {
    std::multiset<int>& of_stream = of_streams_[stream_id];
    of_stream.erase(taken);
    if (of_stream.empty()) of_streams_.erase(stream_id);
  };
  const auto taken = of_streams_[request.stream_id].insert(request.sms);
  if (!fits(request.num_streams)) {
    remove(taken);
    return nullptr;
  }
  return {this, [this, remove, taken](const void*) {
            const std::lock_guard again(mutex_);
            remove(taken);
          }};
}

bool WaitingRoom::fits(int num_streams) const {
  int sum = 0;
  for (const auto& [stream, taken] : of_streams_) sum += *taken.rbegin();
  const bool is_one_call = std::ssize(of_streams_) <= num_streams;
  return sum <= (is_one_call ? num_sms_ : num_sms_ * 3 / 4);
}

uint64_t id_of(cudaStream_t stream) {
  return reinterpret_cast<uint64_t>(stream);
}

}  // namespace crossdock::cuda
