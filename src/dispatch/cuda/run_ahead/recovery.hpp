#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dispatch/cuda/rank_streams.hpp"
#include "dispatch/cuda/run_ahead/call_log.hpp"

namespace crossdock::cuda {

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

  /// Dispatchers must be added in the same order on all ranks.
  void add(RankAgreement& dispatcher) { dispatchers_.push_back(&dispatcher); }
  void remove(RankAgreement& dispatcher) { std::erase(dispatchers_, &dispatcher); }

  /// For a rank whose devices are halted, or that refuses a call of `dispatcher`. All ranks call
  /// it, each from the call in which it notices. Meets the other hosts, resumes, and throws the
  /// same error on all ranks.
  [[noreturn]] void recover(RankAgreement& dispatcher, const std::optional<RefusedCall>& refused);

 private:
  void meet_hosts();

  Group& group_;
  std::vector<RankAgreement*> dispatchers_;
};

}  // namespace crossdock::cuda
