#include <algorithm>
#include <map>
#include <utility>

#include "comm/exchange_arguments.hpp"
#include "comm/threads/board.hpp"
#include "core/check.hpp"
#include "core/stream_copy.hpp"
#include "crossdock/threads.hpp"

namespace crossdock {
namespace comm {
namespace {

// Copying so much once more costs less than waiting until the readers have it.
constexpr int64_t kMaxInlinedBytes = int64_t{16} << 10;

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
                    std::span<const int64_t> recv_offsets, const WaitContext& wait) override {
    check_gather(send, recv, recv_offsets, rank_, size());
    exchange(send, {}, recv, recv_offsets, wait);
  }

  void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                    const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                    const WaitContext& wait) override {
    check_blocks("send", send, send_offsets, size());
    check_blocks("recv", recv, recv_offsets, size());
    exchange(send, send_offsets, recv, recv_offsets, wait);
  }

  std::unique_ptr<Communicator> subgroup(std::span<const int> members) override {
    check_members(members, rank_, size());
    const uint64_t number = num_subgroups_[{members.begin(), members.end()}]++;
    return std::make_unique<ThreadCommunicator>(board_->subgroup(members, number),
                                                rank_among(members, rank_));
  }

  void keep_alive(const std::shared_ptr<const void>& memory) override {
    board_->keep_alive(memory);
  }
  void abort(const Error& cause) override { board_->fail(failure_from(cause, rank_)); }
  void leave(std::string_view reason) override { board_->leave(rank_, reason); }

 private:
  // Without send_offsets everybody gets all of `send`.
  void exchange(const SharedBytes& send, std::span<const int64_t> send_offsets,
                const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                const WaitContext& wait);
  void fill_post(const SharedBytes& send, std::span<const int64_t> send_offsets);
  void read_posts(const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                  const WaitContext& wait);

  const std::shared_ptr<ThreadBoard> board_;
  const int rank_;
  uint64_t num_exchanges_ = 0;
  std::map<std::vector<int>, uint64_t> num_subgroups_;  // made so far, by members
  Traffic traffic_;
};

void ThreadCommunicator::exchange(const SharedBytes& send, std::span<const int64_t> send_offsets,
                                  const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                                  const WaitContext& wait) {
  ++num_exchanges_;
  fill_post(send, send_offsets);
  board_->post(rank_, num_exchanges_);
  board_->await_all_posted(rank_, num_exchanges_, wait);
  read_posts(recv, recv_offsets, wait);
}

void ThreadCommunicator::fill_post(const SharedBytes& send, std::span<const int64_t> send_offsets) {
  ThreadPost& post = board_->post_of(rank_, num_exchanges_);
  post.offsets.assign(send_offsets.begin(), send_offsets.end());
  post.num_bytes = send.num_bytes;
  post.is_inlined = send.num_bytes <= kMaxInlinedBytes;
  if (post.is_inlined) post.inlined.assign(send.data, send.data + send.num_bytes);
  post.data = post.is_inlined ? post.inlined.data() : send.data;
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
  for (int i = 0; i < size(); ++i) {  // each rank begins with itself, so that they spread out
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

}  // namespace
}  // namespace comm

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size,
                                                                     const ThreadOptions& options) {
  CROSSDOCK_CHECK(size > 0, "there must be at least one rank, got ", size);
  CROSSDOCK_CHECK(options.ranks_per_node >= 0, "ranks_per_node must be 0 (one node) or positive, ",
                  "got ", options.ranks_per_node);
  auto board = std::make_shared<comm::ThreadBoard>(
      size, options.ranks_per_node > 0 ? Topology::uniform(size, options.ranks_per_node)
                                       : Topology::single_node(size));
  std::vector<std::unique_ptr<Communicator>> communicators;
  communicators.reserve(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    communicators.push_back(std::make_unique<comm::ThreadCommunicator>(board, rank));
  }
  return communicators;
}

}  // namespace crossdock
