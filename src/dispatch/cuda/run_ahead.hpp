#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"
#include "dispatch/cuda/rank_streams.hpp"

namespace crossdock::cuda {

/// A call as the ranks compare it.
struct CallText {
  const char* operation = "";
  uint64_t subject = 0;  // number of the plan; 0: none yet
  std::string config{};  // must be identical on every rank
};

/// The last calls that this rank has queued without meeting the other hosts. If the devices detect
/// that calls differ, the log says what they were.
class CallLog {
 public:
  /// Returns the number of the call, from 1.
  uint32_t add(const char* operation, uint64_t subject, std::string_view config);
  /// The call with this number; null if it is no longer kept.
  const CallText* find(uint32_t number) const;

 private:
  // More than a stream holds: a launch waits if about 1000 launches are pending.
  static constexpr size_t kMostCalls = 1024;

  std::vector<CallText> calls_;  // call n is at (n - 1) % kMostCalls
  uint32_t last_ = 0;
};

/// A hash of the call for QueuedCall.
uint32_t hash_of_call(const char* operation, uint64_t subject, std::string_view config);

/// What a rank knows about the call at which all ranks' devices were halted.
struct CallAccount {
  CallText call{};
  std::optional<Error> refusal{};  // why this rank refused it
};

/// The hosts meet and find out why their devices were halted. Returns the same error on every rank:
/// the one that Group::agree would have thrown had the hosts met in that call. A rank has no
/// account if its device was halted because another rank stopped; if no rank has one, the error is
/// kInternal. Collective.
Error explain_halt(Group& group, const std::optional<CallAccount>& own);

/// A call that this rank refuses, in one of its lanes.
struct RefusedCall {
  CallAccount account;
  const RankStreams::Lane* lane;
};

class RankAgreement;

/// One rank's dispatchers in a group that run ahead. If a call of one of them halts the
/// devices, all of them stop until the hosts have met: kernels of several dispatchers may wait in
/// one stream, and a rank that has found an error calls none of them.
class Recovery {
 public:
  explicit Recovery(Group& group) : group_(group) {}
  Recovery(const Recovery&) = delete;
  Recovery& operator=(const Recovery&) = delete;

  /// The group's instance, made on first use.
  static std::shared_ptr<Recovery> of(Group& group);
  /// The same, but null if the group has no dispatcher that runs ahead.
  static std::shared_ptr<Recovery> find(Group& group);

  /// Dispatchers must be added in the same order on all ranks.
  void add(RankAgreement& dispatcher) { dispatchers_.push_back(&dispatcher); }
  void remove(RankAgreement& dispatcher) { std::erase(dispatchers_, &dispatcher); }

  /// For a rank whose devices are halted, or that refuses a call of `dispatcher`, or that learns
  /// from another rank's host. All ranks call it, each from the call in which it notices, perhaps
  /// one of a dispatcher that never runs ahead. Meets the other hosts, resumes, and throws the same
  /// error on all ranks.
  [[noreturn]] void recover(RankAgreement& dispatcher, const std::optional<RefusedCall>& refused);

 private:
  void meet_hosts();

  Group& group_;
  std::vector<RankAgreement*> dispatchers_;
};

}  // namespace crossdock::cuda
