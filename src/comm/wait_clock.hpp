#pragma once

#include <chrono>
#include <optional>

#include "comm/deadlines.hpp"
#include "comm/transfers.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// The deadlines of one exchange. A peer must arrive within `arrival` of the beginning; once all
/// pending peers have arrived, at most `progress` may pass without a message.
class WaitClock {
 public:
  explicit WaitClock(const WaitContext& wait)
      : wait_(wait), begin_(Clock::now()), last_progress_(begin_) {}

  void note_progress() { last_progress_ = Clock::now(); }
  std::chrono::nanoseconds idle() const { return Clock::now() - last_progress_; }

  /// The time waited, if over the deadline.
  std::optional<std::chrono::nanoseconds> expired(const Transfers& transfers) const;
  /// The time left if there is no further progress.
  std::chrono::nanoseconds left(const Transfers& transfers) const;

 private:
  Clock::time_point end_if(bool all_arrived) const;

  const WaitContext& wait_;
  Clock::time_point begin_;
  Clock::time_point last_progress_;
};

}  // namespace crossdock::comm
