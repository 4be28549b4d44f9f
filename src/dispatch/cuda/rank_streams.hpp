#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "comm/cuda/peer_channel.hpp"
#include "comm/cuda/stream_watch.hpp"
#include "core/cuda/callers_stream.hpp"
#include "core/cuda/device.hpp"
#include "core/cuda/stream.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cuda {

/// The streams in which one rank queues its work: the caller's, and one of its own for calls that
/// run beside it.
class RankStreams {
 public:
  RankStreams(Group& group, int device);

  /// What the kernels of one stream share: they run one after the other.
  struct Lane {
    std::shared_ptr<PeerChannel> channel;
    bool is_connected = false;                  // or need not be
    std::shared_ptr<const OwnedStream> stream;  // null: the caller's
  };
  /// How a lane gets its channel; called now, and when work first runs beside the caller's stream.
  using MakeLane = std::function<Lane()>;
  void open(MakeLane make_lane);

  /// Surrounds every call. If the caller's stream is the calling thread's own, what the thread
  /// queues there afterwards comes after the call.
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
  /// If the caller's stream is the calling thread's own, the call comes after what the thread has
  /// queued there. Inside a CallScope, before anything that depends on the stream.
  void follow_caller() const { callers_.follow_thread(); }

  /// The caller's stream; another than before waits for this rank's work in the previous one.
  void set_callers_stream(Stream stream);
  bool is_per_thread() const { return callers_.is_per_thread(); }

  /// The stream for work, and its lane.
  cudaStream_t stream() const;
  Lane& lane() { return is_aside_ ? *aside_ : main_; }
  const Lane& lane() const { return is_aside_ ? *aside_ : main_; }
  std::vector<Lane*> lanes();
  /// Work is about to be queued in stream().
  void note_work() { has_queued_ = has_queued_ || !is_aside_; }

  /// Work is queued in a stream of its own, with signals of its own, until end_aside (see Path).
  void begin_aside();
  std::shared_ptr<const void> end_aside();
  void finish(const std::shared_ptr<const void>& done) const;

  const std::shared_ptr<StreamWatch>& watch() const { return watch_; }
  /// Waits for stream(). If it does not end in time, the group fails and throws.
  void await() const { await(stream()); }
  /// Whether all work of a lane has ended. If it does not end in time, the group fails.
  bool ends_in_time(const Lane& lane) noexcept;

 private:
  cudaStream_t callers_stream() const { return callers_.get(); }
  /// The given stream, or cudaStreamPerThread.
  cudaStream_t wanted_stream(Stream stream) const;
  void await(cudaStream_t stream) const;

  Group& group_;
  int device_;
  CallersStream callers_;
  std::shared_ptr<StreamWatch> watch_;
  MakeLane make_lane_;
  Lane main_;
  std::optional<Lane> aside_;  // made when first needed
  bool is_aside_ = false;
  bool has_queued_ = false;  // into the caller's stream
};

}  // namespace crossdock::cuda
