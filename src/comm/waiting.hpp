#pragma once

#include <chrono>
#include <span>
#include <string>
#include <utility>

#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

using Clock = std::chrono::steady_clock;

/// Deadline for a peer to arrive: CROSSDOCK_ARRIVAL_DEADLINE in seconds, else 600 s.
/// Throws kInvalidArgument if the variable is set but is not a positive number.
std::chrono::nanoseconds default_arrival_deadline();

/// Deadline without progress: CROSSDOCK_PROGRESS_DEADLINE in seconds, else 30 s. Throws as above.
std::chrono::nanoseconds default_progress_deadline();

/// `duration` after `start`, without overflow.
Clock::time_point deadline_after(Clock::time_point start, std::chrono::nanoseconds duration);

/// "30 s", "0.25 s".
std::string to_seconds_text(std::chrono::nanoseconds duration);

/// Tells the user about a long wait, once.
class OnceNotice {
 public:
  OnceNotice() = default;
  OnceNotice(const OnWait* on_wait, std::chrono::nanoseconds after)
      : on_wait_(on_wait != nullptr && *on_wait ? on_wait : nullptr), after_(after) {}

  /// False if nobody wants to know.
  bool is_due(std::chrono::nanoseconds waited) const {
    return on_wait_ != nullptr && waited >= after_;
  }
  /// When it will be due; the largest value if never.
  std::chrono::nanoseconds due_after() const {
    return on_wait_ != nullptr ? after_ : std::chrono::nanoseconds::max();
  }
  /// Afterwards it is not due again. REQUIRES: is_due.
  void say(const WaitNotice& notice) noexcept {
    const OnWait* listener = std::exchange(on_wait_, nullptr);
    try {
      (*listener)(notice);
    } catch (...) {
      // The wait goes on without it.
    }
  }

 private:
  const OnWait* on_wait_ = nullptr;
  std::chrono::nanoseconds after_{};
};

/// "rank 3", "ranks 3, 5", "ranks 0, 1, 2, 3, 4, 5, 6, 7, ...".
std::string to_ranks_text(std::span<const int> ranks);
/// Ranks beyond this number are not named.
inline constexpr size_t kMaxNamedRanks = 8;

}  // namespace crossdock::comm
