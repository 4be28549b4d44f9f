#include "comm/threads/board.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/waiting.hpp"

namespace crossdock::comm {

void ThreadPost::set_inlined(std::span<const std::byte> bytes) {
  is_inlined = true;
  num_bytes = std::ssize(bytes);
  if (bytes.size() > kSmallBytes) {
    large.assign(bytes.begin(), bytes.end());
    data = large.data();
    return;
  }
  if (!bytes.empty()) std::memcpy(small.data(), bytes.data(), bytes.size());
  data = small.data();
}

void ThreadPost::set_offsets(std::span<const int64_t> given) {
  own_offsets.assign(given.begin(), given.end());
  offsets = given.empty() ? nullptr : own_offsets.data();
}

std::span<const std::byte> ThreadPost::part_for(int reader) const {
  if (offsets == nullptr) return {data, static_cast<size_t>(num_bytes)};
  return {data + offsets[reader], static_cast<size_t>(offsets[reader + 1] - offsets[reader])};
}

ThreadBoard::ThreadBoard(int size, Topology topology, bool may_spin)
    : topology_(std::move(topology)), seats_(static_cast<size_t>(size)), bell_(may_spin) {}

void ThreadBoard::check_open(int rank) {
  if ((seat_of(rank).last_posted.load() & kStopped) != 0) throw_failure(rank);
}

// The words of the seats are written and read in sequentially consistent order, so the rank that
// posts last sees that all have posted, and wakes those that sleep.
void ThreadBoard::post(int rank, uint64_t n) {
  uint64_t before = n - 1;
  if (!seat_of(rank).last_posted.compare_exchange_strong(before, n)) throw_failure(rank);
}

bool ThreadBoard::has_posted(int rank, uint64_t n) {
  const uint64_t last = seat_of(rank).last_posted.load();
  return last >= n && (last & kStopped) == 0;
}

void ThreadBoard::await_all_posted(int rank, uint64_t n, const WaitContext& wait) {
  int peer = 0;
  const auto all_have_posted = [&] {
    while (peer < size() && has_posted(peer, n)) ++peer;
    return peer == size();
  };
  if (all_have_posted()) {
    bell_.wake();
    return;
  }
  const auto begin = Clock::now();
  const auto deadline = deadline_after(begin, wait.arrival);
  OnceNotice notice(wait.on_wait, wait.notice_after);
  for (auto now = begin;; now = Clock::now()) {
    const uint32_t seen = bell_.read();
    if (all_have_posted()) return;
    const bool is_late = now >= deadline;
    const bool must_check = is_late || has_trouble_.load();
    if (must_check && check_exchange(rank, n, wait, is_late)) return;
    if (notice.is_due(now - begin)) {
      notice.say({.rank = rank,
                  .size = size(),
                  .awaited = missing_in(n),
                  .operation = wait.operation,
                  .sequence = wait.sequence,
                  .waited = now - begin,
                  .left = deadline - now});
    }
    bell_.wait(seen, std::min(deadline, deadline_after(begin, notice.due_after())),
               all_have_posted);
  }
}

std::vector<int> ThreadBoard::missing_in(uint64_t n) {
  std::vector<int> missing;
  for (int rank = 0; rank < size(); ++rank) {
    if (!has_posted(rank, n)) missing.push_back(rank);
  }
  return missing;
}

bool ThreadBoard::stop_before(int rank, uint64_t n) {
  std::atomic<uint64_t>& last_posted = seat_of(rank).last_posted;
  uint64_t last = last_posted.load();
  do {
    if (last >= n) return (last & kStopped) != 0;
  } while (!last_posted.compare_exchange_weak(last, last | kStopped));
  return true;
}

bool ThreadBoard::check_exchange(int rank, uint64_t n, const WaitContext& wait, bool is_late) {
  const std::lock_guard lock(mutex_);
  for (int peer = 0; peer < size() && !failure_; ++peer) {
    const std::optional<std::string>& left = seat_of(peer).left;
    if (!left && !is_late) continue;
    if (!stop_before(peer, n)) continue;
    set_failure(
        left ? left_failure(peer, *left, wait)
             : late_failure({.culprit = peer, .reporter = rank, .waited = wait.arrival}, wait));
  }
  if (!failure_) return false;
  // An exchange succeeds once all ranks have posted.
  const bool is_complete =
      std::ranges::all_of(seats_, [n](const Seat& seat) { return seat.posted_at_failure >= n; });
  if (!is_complete) throw to_error(*failure_, rank, size());
  return true;
}

void ThreadBoard::finish_reading(int rank, uint64_t n) {
  const uint64_t before = num_reads_.fetch_add(1);
  if ((before + 1) % static_cast<uint64_t>(size()) == 0) {
    last_read_.store(n);
    bell_.wake();
  }
  if (post_of(rank, n).is_inlined) return;
  // The others are copying and wait for nobody, so this wait needs no deadline.
  const auto all_have_read = [&] { return last_read_.load() >= n; };
  while (!all_have_read()) {
    bell_.wait(bell_.read(), Clock::now() + std::chrono::hours(1), all_have_read);
  }
}

void ThreadBoard::fail(Failure failure) {
  const std::lock_guard lock(mutex_);
  if (!failure_) set_failure(std::move(failure));
}

void ThreadBoard::set_failure(Failure failure) {
  failure_ = std::move(failure);
  for (Seat& seat : seats_) {
    seat.posted_at_failure = seat.last_posted.fetch_or(kStopped) & ~kStopped;
  }
  has_trouble_.store(true);
  bell_.ring();
}

void ThreadBoard::throw_failure(int rank) {
  const std::lock_guard lock(mutex_);
  throw to_error(*failure_, rank, size());
}

void ThreadBoard::leave(int rank, std::string_view reason) {
  std::vector<std::shared_ptr<const void>> to_free;  // after the lock
  const std::lock_guard lock(mutex_);
  Seat& seat = seat_of(rank);
  if (seat.left) return;
  seat.left = reason;
  if (++num_left_ == size()) to_free.swap(kept_alive_);
  has_trouble_.store(true);
  bell_.ring();
}

void ThreadBoard::keep_alive(std::shared_ptr<const void> memory) {
  const std::lock_guard lock(mutex_);
  kept_alive_.push_back(std::move(memory));
}

std::shared_ptr<ThreadBoard> ThreadBoard::subgroup(std::span<const int> members, uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto key = std::pair(std::vector<int>(members.begin(), members.end()), number);
  Subgroup& subgroup = subgroups_[key];
  if (!subgroup.board) {
    subgroup.board = std::make_shared<ThreadBoard>(static_cast<int>(members.size()),
                                                   topology_.subset(members), bell_.may_spin());
  }
  auto board = subgroup.board;
  if (++subgroup.num_joined == members.size()) subgroups_.erase(key);
  return board;
}

}  // namespace crossdock::comm
