#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/failure.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// What one rank sends in one exchange. The readers copy from it.
struct ThreadPost {
  const std::byte* data = nullptr;  // the sender's memory, or `inlined`
  std::vector<int64_t> offsets;  // [P + 1] part of each reader; empty: every reader gets all of it
  int64_t num_bytes = 0;
  bool is_inlined = false;
  std::vector<std::byte> inlined;  // copy of a small send, so that the sender need not wait

  std::span<const std::byte> part_for(int reader) const;
};

/// The state that the communicators of P thread ranks share.
///
/// Exchange number n (from 1) of a rank:
///   post(n) publishes the rank's own post of parity n % 2;
///   await_all_posted(n) is a barrier, the only wait that can fail;
///   the rank copies its part of all posts, without the lock;
///   finish_reading(n) waits for all readers if they read this rank's memory.
/// A failure stops the posting, so an exchange either succeeds on all ranks or moves nothing, and
/// memory is never read after its rank has returned from the exchange. A post may be overwritten
/// after two exchanges: no rank posts n + 1 before it has read n, and all ranks have posted n + 1
/// before any rank starts n + 2.
class ThreadBoard {
 public:
  ThreadBoard(int size, Topology topology);

  int size() const { return static_cast<int>(seats_.size()); }
  const Topology& topology() const { return topology_; }

  /// The post of `rank` in exchange n; written by its rank before post(n), read by all others
  /// between await_all_posted(n) and finish_reading(n).
  ThreadPost& post_of(int rank, uint64_t n) {
    return seats_[static_cast<size_t>(rank)].posts[n % 2];
  }

  /// Throws the failure instead, if there is one.
  void post(int rank, uint64_t n);
  void await_all_posted(int rank, uint64_t n, const WaitContext& wait);
  void finish_reading(int rank, uint64_t n);

  /// Ends all waits for posts with this failure. Only the first failure counts.
  void fail(Failure failure);
  /// `rank` posts no more. The last rank to leave frees what was kept alive.
  void leave(int rank, std::string_view reason);
  void keep_alive(std::shared_ptr<const void> memory);

  /// The board of subgroup number `number` with these members. The first caller makes it.
  std::shared_ptr<ThreadBoard> subgroup(std::span<const int> members, uint64_t number);

 private:
  struct Seat {
    std::array<ThreadPost, 2> posts;
    uint64_t num_posted = 0;
    std::optional<std::string> left;  // the reason, if the rank has left
  };
  struct Subgroup {
    std::shared_ptr<ThreadBoard> board;
    size_t num_joined = 0;
  };

  void set_failure(Failure failure);  // REQUIRES: mutex_ is held
  [[noreturn]] void throw_failure(int rank) const;

  const Topology topology_;
  mutable std::mutex mutex_;
  std::condition_variable all_posted_or_failed_;
  std::condition_variable all_read_;
  std::vector<Seat> seats_;
  int num_posted_ = 0;        // ranks that have posted exchange last_posted_ + 1
  uint64_t last_posted_ = 0;  // last exchange that all have posted
  int num_read_ = 0;          // ranks that have read exchange last_posted_
  uint64_t last_read_ = 0;    // last exchange that all have read
  int num_left_ = 0;
  std::optional<Failure> failure_;
  std::vector<std::shared_ptr<const void>> kept_alive_;
  std::map<std::pair<std::vector<int>, uint64_t>, Subgroup> subgroups_;
};

}  // namespace crossdock::comm
