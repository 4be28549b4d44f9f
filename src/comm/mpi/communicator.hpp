#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/polled/communicator.hpp"
#include "comm/polled/control_message.hpp"
#include "comm/polled/process_end.hpp"
#include "comm/polled/transfers.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::comm {

/// The control messages of one communicator, sent with MPI.
class MpiControl final : public ControlLinks {
 public:
  /// Needs exclusive use of `communicator`.
  explicit MpiControl(MPI_Comm communicator);
  ~MpiControl() override;
  MpiControl(const MpiControl&) = delete;
  MpiControl& operator=(const MpiControl&) = delete;

  void send(int peer, const ControlMessage& message) override;
  void send_to_all_others(const ControlMessage& message) override;
  void say_goodbye(const ControlMessage& message) const override;
  void poll(const std::function<void(int sender, const ControlMessage&)>& handle) override;

 private:
  struct Outgoing {
    MPI_Request request = MPI_REQUEST_NULL;
    std::shared_ptr<ControlMessage> message;
  };

  void post_receive();
  MPI_Request post_send(int peer, const ControlMessage& message) const;
  void forget_what_was_sent();

  MPI_Comm communicator_;
  std::vector<int> peers_;  // all other ranks
  MPI_Request receive_ = MPI_REQUEST_NULL;
  std::shared_ptr<ControlMessage> incoming_;
  std::vector<Outgoing> outgoing_;
};

/// The messages of one exchange with MPI, sent and received in chunks with at most max_in_flight
/// pending requests, whatever their sizes: half of them receives and half sends, so neither can
/// block the other.
class MpiTransfers final : public Transfers {
 public:
  struct Args {
    MPI_Comm communicator = MPI_COMM_NULL;
    int tag = 0;
    std::vector<PeerBytes> peer_bytes;                // [P]; this rank's own is ignored
    std::vector<std::shared_ptr<const void>> memory;  // keeps the memory of the bytes alive
  };
  MpiTransfers(Args args, const MpiOptions& options, Traffic& traffic);
  /// Abandons pending requests: they are kept, with their memory, until exit.
  ~MpiTransfers() override;
  MpiTransfers(const MpiTransfers&) = delete;
  MpiTransfers& operator=(const MpiTransfers&) = delete;

  bool is_done() const override {
    return sends_.queue.empty() && receives_.queue.empty() && requests_.empty();
  }
  /// Posts as many requests as the limit allows and collects those that have completed.
  bool advance() override;
  bool is_pending(int peer) const override { return num_missing_[static_cast<size_t>(peer)] > 0; }
  bool has_arrived(int peer) const override { return has_arrived_[static_cast<size_t>(peer)]; }
  int size() const override { return static_cast<int>(num_missing_.size()); }

 private:
  struct Message {
    int peer = 0;
    bool is_send = false;
    int num_bytes = 0;
  };
  struct Direction {
    ChunkQueue queue;
    int num_in_flight = 0;
  };

  void post(Direction& direction, bool is_send);
  bool take_completed();
  void take(const Message& message, const MPI_Status& status, bool failed);

  Args args_;
  const MpiOptions options_;
  Traffic& traffic_;
  Direction sends_;
  Direction receives_;
  std::vector<MPI_Request> requests_;  // pending
  std::vector<Message> messages_;      // of requests_
  std::vector<int> completed_;         // scratch of MPI_Testsome
  std::vector<MPI_Status> statuses_;
  std::vector<int64_t> num_missing_;  // [P] incomplete chunks
  std::vector<bool> has_arrived_;     // [P]
};

/// Moves bytes with MPI. After setup it makes no blocking MPI call: transfers are requests that are
/// polled.
class MpiCommunicator final : public PolledCommunicator {
 public:
  /// Takes ownership of both MPI communicators. They are freed after all ranks have left without a
  /// failure (closing.hpp), and never after a failure.
  MpiCommunicator(MPI_Comm data, MPI_Comm control, Members members, const MpiOptions& options);
  ~MpiCommunicator() override;
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  std::string_view name() const override { return "mpi"; }
  int64_t max_bytes_in_flight() const override {
    return options_.max_in_flight / 2 * options_.chunk_bytes;
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> members) override;

 private:
  ControlLinks& control() override { return *control_; }
  std::unique_ptr<Transfers> start(ExchangeArgs args, Traffic& traffic) override;
  void note_failure() override;
  bool is_open() const override;
  void close();

  const MPI_Comm data_;
  const MPI_Comm control_communicator_;
  std::unique_ptr<MpiControl> control_;  // set until the destructor
  const MpiOptions options_;
  const ExitNotice exit_notice_{[this] { leave_quietly("its process is exiting"); }};
};

}  // namespace crossdock::comm
