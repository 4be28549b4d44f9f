#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/polled/communicator.hpp"
#include "comm/polled/process_end.hpp"
#include "comm/sockets/links.hpp"
#include "comm/sockets/transfers.hpp"

namespace crossdock::comm {

/// Ranks that are processes, however they are started: shared memory on a node, TCP between nodes.
class SocketsCommunicator final : public PolledCommunicator {
 public:
  /// `note`: see sockets_note.
  SocketsCommunicator(Members members, std::unique_ptr<Links> links, std::string note);
  ~SocketsCommunicator() override;
  SocketsCommunicator(const SocketsCommunicator&) = delete;
  SocketsCommunicator& operator=(const SocketsCommunicator&) = delete;

  std::string_view name() const override { return "sockets"; }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks) override;

  Endpoint& endpoint() const { return links_->endpoint(); }
  std::string note() const override { return note_; }

 private:
  ControlLinks& control() override { return *links_; }
  std::unique_ptr<Transfers> start(ExchangeArgs args, Traffic& traffic) override;
  bool has_quick_gather(std::span<const int64_t> recv_offsets) const override;
  Transfers* start_gather(const GatherArgs& args) override;
  void pause(std::chrono::nanoseconds idle) override { links_->pause(idle); }
  std::optional<std::string> end_of(int peer) const override { return links_->end_of(peer); }
  std::optional<ControlMessage> refusal() const override { return links_->refusal(); }
  void check_interrupt(const WaitContext& wait) override;
  void check_process() const;  // throws in a forked child
  bool is_open() const override { return endpoint().is_in_creator(); }

  const std::unique_ptr<Links> links_;
  std::optional<PostedTransfers> posted_;  // if all ranks are on this node
  const std::string note_;
  std::map<std::vector<int>, uint64_t> num_subgroups_;  // made so far, by members
  Clock::time_point last_interrupt_check_ = Clock::now();
  const ExitNotice exit_notice_{[this] { leave_quietly("its process is exiting"); }};
};

}  // namespace crossdock::comm
