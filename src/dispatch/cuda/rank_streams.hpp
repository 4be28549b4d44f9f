#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/cuda/peer_channel.hpp"
#include "comm/cuda/stream_watch.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cuda {

/// The streams in which one rank queues its work: the caller's, and one of its own for calls that
/// run concurrently with it.
class RankStreams {
 public:
  RankStreams(Group& group, int device);

  /// State shared by the kernels of one stream, which run in order.
  struct Lane {
    std::shared_ptr<PeerChannel> channel;
    bool is_connected = false;                  // or needs no connection
    std::shared_ptr<const OwnedStream> stream;  // null: the caller's
    std::vector<Buffer> scratch{};              // of plans; graphs may use any, the last is largest
  };
  /// Makes a lane with its channel; called by open and by the first enter_aside.
  using MakeLane = std::function<Lane()>;
  void open(MakeLane make_lane);

  /// Surrounds every call. If the caller's stream is the calling thread's own, work that the thread
  /// queues there afterwards runs after the call.
  class CallScope {
   public:
    explicit CallScope(const RankStreams& streams)
        : guard_(streams.device_), callers_(streams.callers_) {}
    ~CallScope() { callers_.lead_thread(); }
    CallScope(const CallScope&) = delete;
    CallScope& operator=(const CallScope&) = delete;

   private:
    CallGuard guard_;
    const CallersStream& callers_;
  };
  /// If the caller's stream is the calling thread's own, the call runs after the work that the
  /// thread has queued there. Call inside a CallScope, before anything that depends on the stream.
  void follow_caller() const { callers_.follow_thread(); }

  /// Sets the caller's stream and returns the previous one.
  cudaStream_t set_callers_stream(Stream stream);
  /// Makes the caller's stream wait for this rank's work in the previous one.
  void wait_for(cudaStream_t before);
  bool is_per_thread() const { return callers_.is_per_thread(); }

  cudaStream_t callers_stream() const { return callers_.get(); }
  /// The lane of the caller's stream.
  Lane& main() { return main_; }
  const Lane& main() const { return main_; }
  bool is_main(const Lane& lane) const { return &lane == &main_; }
  std::vector<Lane*> lanes();  // none before open
  cudaStream_t stream_of(const Lane& lane) const {
    return lane.stream ? lane.stream->get() : callers_stream();
  }
  /// Records that work is about to be queued in the lane's stream.
  void note_work(const Lane& lane) { has_queued_ = has_queued_ || is_main(lane); }

  /// The lane of begun calls, with a stream of its own. It waits for the work that is already in
  /// the caller's stream and runs concurrently with later work there.
  Lane& enter_aside();
  /// Marks all work queued in the lane so far; finish makes the caller's stream wait for the mark.
  std::shared_ptr<const void> mark(const Lane& lane) const;
  void finish(const std::shared_ptr<const void>& done) const;

  const std::shared_ptr<StreamWatch>& watch() const { return watch_; }
  /// Waits for the lane's work. On a timeout, fails the group and throws.
  void await(const Lane& lane) const { await(stream_of(lane)); }
  /// Waits for a lane's work; returns whether it ended in time. If not, the group fails.
  bool ends_in_time(const Lane& lane) noexcept;

 private:
  void await(cudaStream_t stream) const;

  Group& group_;
  int device_;
  CallersStream callers_;
  std::shared_ptr<StreamWatch> watch_;
  MakeLane make_lane_;
  Lane main_;
  std::optional<Lane> aside_;  // made when first needed
  bool has_queued_ = false;    // work is in the caller's stream
};

}  // namespace crossdock::cuda
