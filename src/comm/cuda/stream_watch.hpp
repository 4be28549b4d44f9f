#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/cuda/stream.hpp"
#include "crossdock/error.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cuda {

/// The stream in which calls of a group's rank queue their work: the given one. Ranks that are
/// threads of one process use cudaStreamPerThread instead of a default stream: in one queue, the
/// kernels of several ranks would wait for each other forever.
inline cudaStream_t group_stream(Group& group, Stream stream) {
  const cudaStream_t given = handle_of(stream);
  const bool is_default = given == nullptr || given == cudaStreamLegacy;
  const bool shares_queue =
      is_default && group.size() > 1 && group.communicator().shares_address_space();
  return shares_queue ? cudaStreamPerThread : given;
}

/// The host's waits for one rank's streams. Every wait ends.
///
/// Kernels of this library end by themselves if a peer does not arrive; those of NCCL do not. A
/// transport therefore announces its exchanges here: one that does not end within the progress
/// deadline, counted from when the host first sees that the stream has reached it, is an error.
/// Other work in a stream (the caller's, kernels that wait for peers) has the sum of both
/// deadlines. Plans keep the watch, so it may outlive the group. Thread-safe.
class StreamWatch {
 public:
  struct Options {
    int rank = 0;
    int size = 1;  // P
    int device = 0;
    std::chrono::nanoseconds arrival_deadline{};
    std::chrono::nanoseconds progress_deadline{};
  };
  explicit StreamWatch(const Options& options);

  /// Called before and after an exchange is queued. An exchange captured in a graph is not watched.
  void begin_exchange(cudaStream_t stream, const char* operation, uint64_t sequence);
  void end_exchange(cudaStream_t stream);

  /// Access to the communicator of the exchanges.
  struct Probe {
    std::function<std::string()> error{};  // polled while exchanges are pending: a message or ""
    /// (optional) Stops the exchanges, which frees the GPU. Called once, when one of them has
    /// failed or is late. Must not wait or call the watch. Without it the message says that the
    /// caller must do so.
    std::function<void()> abort{};
  };
  void set_probe(Probe probe);

  /// The error of an exchange that has failed or takes too long; it is permanent. Does not wait.
  std::optional<Error> fault();

  /// Waits until the stream has finished all its work. Returns the error otherwise: the fault,
  /// kTimeout after `limit` (default: the sum of both deadlines), or kCuda.
  std::optional<Error> try_await(cudaStream_t stream,
                                 std::optional<std::chrono::nanoseconds> limit = {});
  /// Like try_await, but throws the error.
  void await(cudaStream_t stream);

 private:
  using Clock = std::chrono::steady_clock;

  struct Exchange {
    std::unique_ptr<OwnedEvent> begin;
    std::unique_ptr<OwnedEvent> end;  // null: still being queued
    const char* operation = "";
    uint64_t sequence = 0;
    std::optional<Clock::time_point> reached{};  // when `begin` was first seen to have passed
  };

  std::unique_ptr<OwnedEvent> take_event();
  std::optional<Error> note_fault(const Error& error);
  const char* fate_of_communicator() const;
  Error failed(const Exchange& exchange, const std::string& reason) const;
  Error late(const Exchange& exchange) const;
  Error held_up(std::chrono::nanoseconds waited) const;

  Options options_;
  std::mutex mutex_;
  std::deque<Exchange> pending_;
  std::vector<std::unique_ptr<OwnedEvent>> spare_events_;
  Probe probe_;
  std::optional<Error> fault_;
};

}  // namespace crossdock::cuda
