#pragma once

#include <array>
#include <atomic>
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
#include "comm/memory/bell.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// The data that one rank sends in one exchange. The readers copy from it. Its first two cache
/// lines hold a send as small as a rendezvous header.
struct alignas(128) ThreadPost {
  static constexpr size_t kSmallBytes = 160;

  const std::byte* data = nullptr;  // the sender's memory, `small` or `large`
  int64_t num_bytes = 0;
  const int64_t* offsets = nullptr;  // [P + 1] part of each reader; null: every reader gets it all
  bool is_inlined = false;           // the sender need not wait for its readers
  std::array<std::byte, kSmallBytes> small{};
  std::vector<std::byte> large;
  std::vector<int64_t> own_offsets;

  /// Copies the bytes into the post.
  void set_inlined(std::span<const std::byte> bytes);
  /// Copies the offsets. None: every reader gets all bytes.
  void set_offsets(std::span<const int64_t> given);
  std::span<const std::byte> part_for(int reader) const;
};

/// The state that the communicators of P thread ranks share.
///
/// Exchange number n (from 1) of a rank:
///   post(n) publishes the rank's own post of parity n % 2;
///   await_all_posted(n) is a barrier, the only wait that can fail;
///   the rank copies its part of all posts;
///   finish_reading(n) waits for all readers if they read this rank's memory.
/// A failure stops the posting, so an exchange either succeeds on all ranks or moves nothing, and
/// memory is never read after its rank has returned from the exchange. A post may be overwritten
/// after two exchanges: no rank posts n + 1 before it has read n, and all ranks have posted n + 1
/// before any rank starts n + 2.
///
/// An undisturbed exchange takes no lock and allocates nothing.
class ThreadBoard {
 public:
  /// Waiting ranks spin for a short time before they sleep if `may_spin`.
  ThreadBoard(int size, Topology topology, bool may_spin);

  int size() const { return static_cast<int>(seats_.size()); }
  const Topology& topology() const { return topology_; }

  /// The post of `rank` in exchange n; written by its rank before post(n), read by all others
  /// between await_all_posted(n) and finish_reading(n).
  ThreadPost& post_of(int rank, uint64_t n) { return seat_of(rank).posts[n % 2]; }

  /// Throws the failure, if there is one. Called before a post is written: after a failure slower
  /// ranks may still read the post that it would overwrite.
  void check_open(int rank);
  /// Throws the failure instead, if there is one.
  void post(int rank, uint64_t n);
  void await_all_posted(int rank, uint64_t n, const WaitContext& wait);
  void finish_reading(int rank, uint64_t n);

  /// Ends all waits for posts with this failure. Only the first failure counts.
  void fail(Failure failure);
  /// `rank` will not post again. The last rank to leave frees what was kept alive.
  void leave(int rank, std::string_view reason);
  void keep_alive(std::shared_ptr<const void> memory);

  /// The board of subgroup number `number` with these members. The first caller makes it.
  std::shared_ptr<ThreadBoard> subgroup(std::span<const int> members, uint64_t number);

 private:
  /// One per rank. The others spin on the word, so it has a cache line of its own.
  struct Seat {
    alignas(128) std::atomic<uint64_t> last_posted{0};  // an exchange; kStopped is set by a failure
    std::array<ThreadPost, 2> posts;
    // Guarded by the mutex.
    uint64_t posted_at_failure = 0;   // last_posted before kStopped was set
    std::optional<std::string> left;  // the reason, if the rank has left
  };
  struct Subgroup {
    std::shared_ptr<ThreadBoard> board;
    size_t num_joined = 0;
  };

  static constexpr uint64_t kStopped = uint64_t{1} << 63;

  Seat& seat_of(int rank) { return seats_[static_cast<size_t>(rank)]; }
  /// Also false if the seat has been stopped; check_exchange handles that.
  bool has_posted(int rank, uint64_t n);
  std::vector<int> missing_in(uint64_t n);
  /// Stops the posting of a rank unless it has posted n. Returns whether it is stopped.
  bool stop_before(int rank, uint64_t n);
  /// Returns true if exchange n is complete, throws if it never will be: a rank has failed or left
  /// or, if it `is_late`, has not posted. False: not yet.
  bool check_exchange(int rank, uint64_t n, const WaitContext& wait, bool is_late);
  /// REQUIRES: mutex_ is held.
  void set_failure(Failure failure);
  [[noreturn]] void throw_failure(int rank);

  const Topology topology_;
  std::vector<Seat> seats_;

  alignas(128) Bell bell_;
  std::atomic<bool> has_trouble_{false};  // a rank has failed or left

  // For exchanges in which ranks wait for their readers.
  alignas(128) std::atomic<uint64_t> num_reads_{0};  // by all ranks
  std::atomic<uint64_t> last_read_{0};               // last exchange that all have read

  std::mutex mutex_;  // guards what follows, and parts of the seats
  std::optional<Failure> failure_;
  int num_left_ = 0;
  std::vector<std::shared_ptr<const void>> kept_alive_;
  std::map<std::pair<std::vector<int>, uint64_t>, Subgroup> subgroups_;
};

/// Ranks that are threads of one process: each copies its part out of its peers' memory.
class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadBoard> board, int rank)
      : board_(std::move(board)), rank_(rank) {}
  ~ThreadCommunicator() override { board_->leave(rank_, kPlainLeave); }
  ThreadCommunicator(const ThreadCommunicator&) = delete;
  ThreadCommunicator& operator=(const ThreadCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return board_->size(); }
  std::string_view name() const override { return "threads"; }
  const Topology& topology() const override { return board_->topology(); }
  bool shares_address_space() const override { return true; }
  Traffic traffic() const override { return traffic_; }

  void all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                    std::span<const int64_t> recv_offsets, const WaitContext& wait) override;
  void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                    const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                    const WaitContext& wait) override;
  std::unique_ptr<Communicator> subgroup(std::span<const int> members) override;
  void keep_alive(const std::shared_ptr<const void>& memory) override {
    board_->keep_alive(memory);
  }
  void abort(const Error& cause) override { board_->fail(failure_from(cause, rank_)); }
  void leave(std::string_view reason) override { board_->leave(rank_, reason); }

 private:
  // Without send_offsets every rank gets all of `send`.
  void exchange(const SharedBytes& send, std::span<const int64_t> send_offsets,
                const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                const WaitContext& wait);
  void fill_post(ThreadPost& post, const SharedBytes& send, std::span<const int64_t> send_offsets);
  void read_posts(const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                  const WaitContext& wait);

  const std::shared_ptr<ThreadBoard> board_;
  const int rank_;
  uint64_t num_exchanges_ = 0;
  std::map<std::vector<int>, uint64_t> num_subgroups_;  // made so far, by members
  Traffic traffic_;
};

}  // namespace crossdock::comm
