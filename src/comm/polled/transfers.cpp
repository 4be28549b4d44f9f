#include "comm/polled/transfers.hpp"

#include <algorithm>

namespace crossdock::comm {

std::vector<int> Transfers::pending_peers() const {
  std::vector<int> peers;
  for (int peer = 0; peer < size(); ++peer) {
    if (is_pending(peer)) peers.push_back(peer);
  }
  return peers;
}

int64_t ChunkQueue::add(int peer, int64_t num_bytes) {
  if (num_bytes == 0) return 0;
  cursors_.push_back({.peer = peer, .done_bytes = 0, .num_bytes = num_bytes});
  return (num_bytes + chunk_bytes_ - 1) / chunk_bytes_;
}

ChunkQueue::Chunk ChunkQueue::take() {
  Cursor& cursor = cursors_[next_];
  const Chunk chunk{.peer = cursor.peer,
                    .offset = cursor.done_bytes,
                    .num_bytes = std::min(chunk_bytes_, cursor.num_bytes - cursor.done_bytes)};
  cursor.done_bytes += chunk.num_bytes;
  if (cursor.done_bytes == cursor.num_bytes) {
    cursors_.erase(cursors_.begin() + static_cast<ptrdiff_t>(next_));
  } else {
    ++next_;
  }
  if (next_ == cursors_.size()) next_ = 0;
  return chunk;
}

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
