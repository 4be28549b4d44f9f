#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/failure.hpp"
#include "comm/threads/board.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

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
