#include "comm/threads/communicator.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "comm/exchange_arguments.hpp"
#include "comm/failure.hpp"
#include "comm/waiting.hpp"
#include "core/check.hpp"
#include "core/stream_copy.hpp"
#include "core/threading.hpp"
#include "crossdock/mesh.hpp"
#include "crossdock/threads.hpp"

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

namespace {

// Copying this much once more is cheaper than waiting for all readers.
constexpr int64_t kMaxInlinedBytes = int64_t{16} << 10;

}  // namespace

void ThreadCommunicator::all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                                      std::span<const int64_t> recv_offsets,
                                      const WaitContext& wait) {
  check_gather(send, recv, recv_offsets, rank_, size());
  exchange(send, {}, recv, recv_offsets, wait);
}

void ThreadCommunicator::all_to_all_v(const SharedBytes& send,
                                      std::span<const int64_t> send_offsets,
                                      const SharedBytes& recv,
                                      std::span<const int64_t> recv_offsets,
                                      const WaitContext& wait) {
  check_blocks("send", send, send_offsets, size());
  check_blocks("recv", recv, recv_offsets, size());
  exchange(send, send_offsets, recv, recv_offsets, wait);
}

std::unique_ptr<Communicator> ThreadCommunicator::subgroup(std::span<const int> members) {
  check_members(members, rank_, size());
  const uint64_t number = num_subgroups_[{members.begin(), members.end()}]++;
  return std::make_unique<ThreadCommunicator>(board_->subgroup(members, number),
                                              rank_among(members, rank_));
}

void ThreadCommunicator::exchange(const SharedBytes& send, std::span<const int64_t> send_offsets,
                                  const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                                  const WaitContext& wait) {
  board_->check_open(rank_);
  fill_post(board_->post_of(rank_, num_exchanges_ + 1), send, send_offsets);
  ++num_exchanges_;  // after everything that may throw for lack of memory
  board_->post(rank_, num_exchanges_);
  board_->await_all_posted(rank_, num_exchanges_, wait);
  read_posts(recv, recv_offsets, wait);
}

void ThreadCommunicator::fill_post(ThreadPost& post, const SharedBytes& send,
                                   std::span<const int64_t> send_offsets) {
  post.set_offsets(send_offsets);
  if (send.num_bytes <= kMaxInlinedBytes) {
    post.set_inlined({send.data, static_cast<size_t>(send.num_bytes)});
  } else {
    post.is_inlined = false;
    post.data = send.data;
    post.num_bytes = send.num_bytes;
  }
  for (int peer = 0; peer < size(); ++peer) {
    count_bytes(traffic_, topology(), rank_, peer,
                static_cast<int64_t>(post.part_for(peer).size()));
  }
}

void ThreadCommunicator::read_posts(const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                                    const WaitContext& wait) {
  std::optional<Error> mismatch;
  bool all_inlined = true;
  const Stores stores = stores_for(recv_offsets.back());
  for (int i = 0; i < size(); ++i) {  // each rank starts with itself, to spread the load
    const int peer = (rank_ + i) % size();
    const ThreadPost& post = board_->post_of(peer, num_exchanges_);
    all_inlined = all_inlined && post.is_inlined;
    const auto part = post.part_for(rank_);
    const int64_t begin = recv_offsets[static_cast<size_t>(peer)];
    const int64_t expected = recv_offsets[static_cast<size_t>(peer) + 1] - begin;
    if (expected != static_cast<int64_t>(part.size())) {
      mismatch.emplace(ErrorCode::kInternal,
                       concat("rank ", peer, " sent ", part.size(), " bytes to rank ", rank_,
                              ", which expected ", expected),
                       ErrorContext{peer, wait.sequence, wait.operation});
    } else if (expected > 0 && part.data() != recv.data + begin) {
      copy_bytes(recv.data + begin, part.data(), expected, stores);
    }
  }
  finish_stores();
  if (!all_inlined) board_->finish_reading(rank_, num_exchanges_);
  if (mismatch) throw *mismatch;
}

}  // namespace crossdock::comm

namespace crossdock {

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size,
                                                                     const ThreadOptions& options) {
  CROSSDOCK_CHECK(size >= 1 && size <= kMaxMeshRanks, "the number of ranks must be in [1, ",
                  kMaxMeshRanks, "], got ", size);
  CROSSDOCK_CHECK(options.ranks_per_node >= 0, "ranks_per_node must be 0 (one node) or positive, ",
                  "got ", options.ranks_per_node);
  auto board = std::make_shared<comm::ThreadBoard>(
      size,
      options.ranks_per_node > 0 ? Topology::uniform(size, options.ranks_per_node)
                                 : Topology::single_node(size),
      /*may_spin=*/size <= detail::num_cores());
  std::vector<std::unique_ptr<Communicator>> communicators;
  communicators.reserve(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    communicators.push_back(std::make_unique<comm::ThreadCommunicator>(board, rank));
  }
  return communicators;
}

namespace {

/// The result of the body on each rank.
struct Outcomes {
  std::vector<std::exception_ptr> errors;  // [P]
  std::atomic<int> first_to_fail{-1};
};

void run_rank(Group& group, const std::function<void(Group&)>& body, Outcomes& outcomes) {
  const auto failed_with = [&](std::string_view reason) {
    int nobody = -1;
    outcomes.first_to_fail.compare_exchange_strong(nobody, group.rank());
    outcomes.errors[static_cast<size_t>(group.rank())] = std::current_exception();
    try {
      group.leave(concat("it threw: ", reason));
    } catch (const std::exception&) {
      // No memory to tell the others; they find out by their deadlines.
    }
  };
  try {
    body(group);
    group.leave(comm::kReturned);
  } catch (const std::exception& error) {
    failed_with(error.what());
  } catch (...) {
    failed_with("a non-standard exception");
  }
}

void run_all(int size, const std::function<void(Group&)>& body, const ThreadOptions& options,
             Outcomes& outcomes) {
  std::vector<std::unique_ptr<Group>> groups;
  for (auto& communicator : make_thread_communicators(size, options)) {
    groups.push_back(std::make_unique<Group>(std::move(communicator), options.group));
  }
  outcomes.errors.resize(groups.size());
  const detail::PoolWait waiting;  // until the threads are joined
  std::vector<std::jthread>
      threads;  // joined before the groups are destroyed, even if one cannot start
  try {
    for (auto& group : groups) {
      threads.emplace_back([&] { run_rank(*group, body, outcomes); });
    }
  } catch (const std::exception& error) {
    for (size_t rank = threads.size(); rank < groups.size(); ++rank) {
      groups[rank]->leave("its thread could not be started");
    }
    throw Error(ErrorCode::kUnsupported, concat("cannot start ", size, " threads: ", error.what()));
  }
}

}  // namespace

std::vector<std::exception_ptr> try_ranks(int size, const std::function<void(Group&)>& body,
                                          const ThreadOptions& options) {
  Outcomes outcomes;
  run_all(size, body, options, outcomes);
  return std::move(outcomes.errors);
}

void run_ranks(int size, const std::function<void(Group&)>& body, const ThreadOptions& options) {
  Outcomes outcomes;
  run_all(size, body, options, outcomes);
  const int first = outcomes.first_to_fail;
  if (first >= 0) std::rethrow_exception(outcomes.errors[static_cast<size_t>(first)]);
}

}  // namespace crossdock
