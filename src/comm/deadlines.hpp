#pragma once

#include <chrono>
#include <string>

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

}  // namespace crossdock::comm
