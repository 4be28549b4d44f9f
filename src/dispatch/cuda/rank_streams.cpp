#include "dispatch/cuda/rank_streams.hpp"

#include <utility>

#include "core/cuda/device.hpp"

namespace crossdock::cuda {

RankStreams::RankStreams(Group& group, int device)
    : group_(group),
      device_(device),
      callers_(device),
      watch_(std::make_shared<StreamWatch>(
          StreamWatch::Options{.rank = group.rank(),
                               .size = group.size(),
                               .device = device,
                               .arrival_deadline = *group.options().arrival_deadline,
                               .progress_deadline = *group.options().progress_deadline})) {}

void RankStreams::open(MakeLane make_lane) {
  make_lane_ = std::move(make_lane);
  main_ = make_lane_();
}

std::vector<RankStreams::Lane*> RankStreams::lanes() {
  std::vector<Lane*> all;
  if (main_.channel) all.push_back(&main_);
  if (aside_) all.push_back(&*aside_);
  return all;
}

cudaStream_t RankStreams::set_callers_stream(Stream stream) {
  const CallGuard guard(device_);
  const cudaStream_t before = callers_stream();
  const cudaStream_t wanted = group_stream(group_, stream);
  // Switching to per-thread streams may wait for the GPU (see enter_aside).
  const bool takes_stream = wanted == cudaStreamPerThread && !callers_.is_per_thread();
  if (takes_stream && has_queued_ && !is_capturing(before)) {
    CROSSDOCK_CUDA(cudaStreamSynchronize(before));
  }
  callers_.set(wanted);
  return before;
}

void RankStreams::wait_for(cudaStream_t before) {
  const CallGuard guard(device_);
  const cudaStream_t after = callers_stream();
  // Kernels of a channel must run in order. A graph being captured and work that runs now need no
  // order.
  if (after == before || !has_queued_ || is_capturing(before) || is_capturing(after)) return;
  const OwnedEvent here(device_);
  here.record(before);
  here.make_wait(after);
}

RankStreams::Lane& RankStreams::enter_aside() {
  const CallGuard guard(device_);
  follow_caller();
  if (!aside_) {
    // Taking memory and a stream may wait for the GPU, where a peer's kernel may be waiting for one
    // that has not been launched. Once this rank's kernels have ended, all have been launched.
    if (!is_capturing(callers_stream())) await(callers_stream());
    Lane lane = make_lane_();
    lane.stream = lease_stream(device_);
    aside_ = std::move(lane);
  }
  const OwnedEvent here(device_);
  here.record(callers_stream());
  here.make_wait(aside_->stream->get());
  return *aside_;
}

std::shared_ptr<const void> RankStreams::mark(const Lane& lane) const {
  const CallGuard guard(device_);
  auto here = std::make_shared<OwnedEvent>(device_);
  here->record(stream_of(lane));
  return here;
}

void RankStreams::finish(const std::shared_ptr<const void>& done) const {
  const CallScope scope(*this);
  if (done) static_cast<const OwnedEvent*>(done.get())->make_wait(callers_stream());
}

void RankStreams::await(cudaStream_t stream) const {
  const std::optional<Error> error = watch_->try_await(stream);
  if (!error) return;
  if (error->code() == ErrorCode::kCuda) throw *error;
  group_.fail(*error);
  group_.check();
}

bool RankStreams::ends_in_time(const Lane& lane) noexcept {
  const bool is_poisoned = group_.is_poisoned();
  if (is_poisoned) lane.channel->abandon();  // ends the waits of this rank's kernels
  const cudaStream_t stream = stream_of(lane);
  const std::optional<Error> error =
      is_poisoned ? watch_->try_await(stream, *group_.options().progress_deadline)
                  : watch_->try_await(stream);
  if (!error || error->code() == ErrorCode::kCuda) return true;  // kCuda: the context is lost
  group_.fail(*error);
  lane.channel->abandon();
  return false;
}

}  // namespace crossdock::cuda
