#include "comm/threads/communicator.hpp"

#include <optional>
#include <utility>

#include "comm/exchange_arguments.hpp"
#include "comm/threads/board.hpp"
#include "core/check.hpp"
#include "core/stream_copy.hpp"
#include "core/threading.hpp"
#include "crossdock/mesh.hpp"
#include "crossdock/threads.hpp"

namespace crossdock::comm {
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

}  // namespace crossdock
