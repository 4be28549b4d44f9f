#include "comm/wait_clock.hpp"

#include <algorithm>

namespace crossdock::comm {
namespace {

bool have_all_arrived(const Transfers& transfers) {
  const auto pending = transfers.pending_peers();
  return std::all_of(pending.begin(), pending.end(),
                     [&](int peer) { return transfers.has_arrived(peer); });
}

}  // namespace

Clock::time_point WaitClock::end_if(bool all_arrived) const {
  const auto without_progress = deadline_after(last_progress_, wait_.progress);
  return all_arrived ? without_progress
                     : std::max(deadline_after(begin_, wait_.arrival), without_progress);
}

std::optional<std::chrono::nanoseconds> WaitClock::expired(const Transfers& transfers) const {
  const auto now = Clock::now();
  if (now < deadline_after(last_progress_, wait_.progress) &&
      now < deadline_after(begin_, wait_.arrival)) {
    return std::nullopt;
  }
  const bool all_arrived = have_all_arrived(transfers);
  if (now < end_if(all_arrived)) return std::nullopt;
  return all_arrived ? wait_.progress : wait_.arrival;
}

std::chrono::nanoseconds WaitClock::left(const Transfers& transfers) const {
  return end_if(have_all_arrived(transfers)) - Clock::now();
}

}  // namespace crossdock::comm
