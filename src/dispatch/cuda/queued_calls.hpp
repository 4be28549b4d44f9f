#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/cuda/peer_signals.cuh"
#include "dispatch/cuda/call_account.hpp"
#include "dispatch/cuda/rank_streams.hpp"

namespace crossdock::cuda {

/// A call that this rank refuses, in one of its lanes.
struct RefusedCall {
  CallAccount account;
  const RankStreams::Lane* lane;
};

/// One dispatcher's part in QueuedCalls.
class CallQueue {
 public:
  virtual ~CallQueue() = default;

  /// Notes a call that this rank refuses; returns its number.
  virtual uint32_t note_refused(const CallText& call) = 0;
  /// Tells the peers that this rank queues no further calls, so that their kernels do not wait for
  /// them. refusing: the lane of call `number`, which this rank refuses; null: none.
  virtual void stop(const RankStreams::Lane* refusing, uint32_t number, Operation operation) = 0;
  /// Waits until the queued work is done. Throws if the group has failed.
  virtual void await_stop() = 0;
  /// What this rank knows about the first halted call, if any. own: this rank's refusal of call
  /// own_number.
  virtual std::optional<CallAccount> account(const std::optional<CallAccount>& own,
                                             uint32_t own_number) const = 0;
  /// Allows calls to be queued again. REQUIRES: await_stop has returned on all ranks. sequence:
  /// number of the meeting.
  virtual void resume(uint64_t sequence) = 0;
};

/// One rank's dispatchers in a group whose calls only queue. If a call of one of them halts the
/// devices, all of them stop until the hosts have met: kernels of several dispatchers may wait in
/// one stream, and a rank that has found an error calls none of them.
class QueuedCalls {
 public:
  explicit QueuedCalls(Group& group) : group_(group) {}
  QueuedCalls(const QueuedCalls&) = delete;
  QueuedCalls& operator=(const QueuedCalls&) = delete;

  /// The group's instance, made on first use.
  static std::shared_ptr<QueuedCalls> of(Group& group);

  /// Queues must be added in the same order on all ranks.
  void add(CallQueue& queue) { queues_.push_back(&queue); }
  void remove(CallQueue& queue) { std::erase(queues_, &queue); }

  /// For a rank whose devices are halted, or that refuses a call of `queue`. All ranks call
  /// it, each from the call in which it notices. Meets the other hosts, resumes, and throws the
  /// same error on all ranks.
  [[noreturn]] void recover(CallQueue& queue, const std::optional<RefusedCall>& refused);

 private:
  void meet_hosts();

  Group& group_;
  std::vector<CallQueue*> queues_;
};

}  // namespace crossdock::cuda
