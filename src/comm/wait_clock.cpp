#include "comm/wait_clock.hpp"

#include <algorithm>

namespace crossdock::comm {

std::optional<std::chrono::nanoseconds> WaitClock::expired(const Transfers& transfers) const {
  const auto now = Clock::now();
  if (now < deadline_after(last_progress_, wait_.progress) &&
      now < deadline_after(begin_, wait_.arrival)) {
    return std::nullopt;
  }
  const auto pending = transfers.pending_peers();
  const bool all_arrived = std::all_of(pending.begin(), pending.end(),
                                       [&](int peer) { return transfers.has_arrived(peer); });
  const auto limit = all_arrived ? deadline_after(last_progress_, wait_.progress)
                                 : std::max(deadline_after(begin_, wait_.arrival),
                                            deadline_after(last_progress_, wait_.progress));
  if (now < limit) return std::nullopt;
  return all_arrived ? wait_.progress : wait_.arrival;
}

}  // namespace crossdock::comm
