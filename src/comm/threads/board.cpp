#include "comm/threads/board.hpp"

#include <utility>

#include "comm/deadlines.hpp"

namespace crossdock::comm {

std::span<const std::byte> ThreadPost::part_for(int reader) const {
  if (offsets.empty()) return {data, static_cast<size_t>(num_bytes)};
  const auto r = static_cast<size_t>(reader);
  return {data + offsets[r], static_cast<size_t>(offsets[r + 1] - offsets[r])};
}

ThreadBoard::ThreadBoard(int size, Topology topology)
    : topology_(std::move(topology)), seats_(static_cast<size_t>(size)) {}

void ThreadBoard::post(int rank, uint64_t n) {
  const std::lock_guard lock(mutex_);
  if (failure_) throw_failure(rank);
  seats_[static_cast<size_t>(rank)].num_posted = n;
  if (++num_posted_ < size()) return;
  num_posted_ = 0;
  last_posted_ = n;
  all_posted_or_failed_.notify_all();
}

void ThreadBoard::await_all_posted(int rank, uint64_t n, const WaitContext& wait) {
  std::unique_lock lock(mutex_);
  const auto deadline = deadline_after(Clock::now(), wait.arrival);
  bool expired = false;
  while (last_posted_ < n) {  // checked first: an exchange that all have posted succeeds
    if (failure_) throw_failure(rank);
    for (int peer = 0; peer < size(); ++peer) {
      const Seat& seat = seats_[static_cast<size_t>(peer)];
      if (seat.num_posted >= n) continue;
      if (seat.left) set_failure(left_failure(peer, *seat.left, wait));
      if (expired) {
        set_failure(
            late_failure({.culprit = peer, .reporter = rank, .waited = wait.arrival}, wait));
      }
      if (failure_) throw_failure(rank);
    }
    expired = all_posted_or_failed_.wait_until(lock, deadline) == std::cv_status::timeout;
  }
}

void ThreadBoard::finish_reading(int rank, uint64_t n) {
  std::unique_lock lock(mutex_);
  if (++num_read_ == size()) {
    num_read_ = 0;
    last_read_ = n;
    all_read_.notify_all();
  }
  // The others are copying and wait for nobody, so this wait needs no deadline.
  if (post_of(rank, n).is_inlined) return;
  all_read_.wait(lock, [&] { return last_read_ >= n; });
}

void ThreadBoard::fail(Failure failure) {
  const std::lock_guard lock(mutex_);
  set_failure(std::move(failure));
}

void ThreadBoard::set_failure(Failure failure) {
  if (failure_) return;
  failure_ = std::move(failure);
  all_posted_or_failed_.notify_all();
}

void ThreadBoard::throw_failure(int rank) const {
  throw to_error(*failure_, rank, size());
}

void ThreadBoard::leave(int rank, std::string_view reason) {
  std::vector<std::shared_ptr<const void>> to_free;  // after the lock
  const std::lock_guard lock(mutex_);
  Seat& seat = seats_[static_cast<size_t>(rank)];
  if (seat.left) return;
  seat.left = reason;
  if (++num_left_ == size()) to_free.swap(kept_alive_);
  all_posted_or_failed_.notify_all();
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
    subgroup.board =
        std::make_shared<ThreadBoard>(static_cast<int>(members.size()), topology_.subset(members));
  }
  auto board = subgroup.board;
  if (++subgroup.num_joined == members.size()) subgroups_.erase(key);
  return board;
}

}  // namespace crossdock::comm
