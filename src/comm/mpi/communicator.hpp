#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "comm/failure.hpp"
#include "comm/mpi/control.hpp"
#include "comm/mpi/exit_notice.hpp"
#include "comm/mpi/inquiry.hpp"
#include "comm/mpi/transfers.hpp"
#include "comm/mpi/wait_clock.hpp"
#include "comm/process_watch.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::comm {

/// The ranks of a communicator, as found at set-up.
struct MpiMembers {
  Topology topology;
  std::vector<ProcessIdentity> processes;  // [P]
};

/// Moves bytes by MPI. After set-up it makes no blocking MPI call: every exchange is a set of
/// requests that are polled, together with the control messages of the peers, until they are done
/// or a deadline has passed.
class MpiCommunicator final : public Communicator {
 public:
  /// Takes ownership of both MPI communicators. They are freed after all ranks have left without a
  /// failure (closing.hpp), and never after a failure.
  MpiCommunicator(MPI_Comm data, MPI_Comm control, MpiMembers members, const MpiOptions& options);
  ~MpiCommunicator() override;
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view name() const override { return "mpi"; }
  const Topology& topology() const override { return members_.topology; }
  int64_t max_bytes_in_flight() const override {
    return options_.max_in_flight / 2 * options_.chunk_bytes;
  }
  Traffic traffic() const override { return traffic_; }

  void all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                    std::span<const int64_t> recv_offsets, const WaitContext& wait) override;
  void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                    const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                    const WaitContext& wait) override;
  std::unique_ptr<Communicator> subgroup(std::span<const int> members) override;
  void abort(const Error& cause) override;
  void leave(std::string_view reason) override;

 private:
  struct Waiting {  // an exchange in progress
    const WaitContext& wait;
    MpiTransfers& transfers;
    MpiWaitClock clock;
    std::optional<MpiInquiry> inquiry;
    Clock::time_point last_watch = Clock::now();
  };

  void exchange(std::vector<MpiLane> lanes, std::vector<std::shared_ptr<const void>> memory,
                const WaitContext& wait);
  void complete(Waiting& waiting);
  void look_for_failures(Waiting& waiting);
  void look_for_dead_processes(Waiting& waiting);
  [[noreturn]] void throw_timeout(Waiting& waiting, std::chrono::nanoseconds waited);
  void handle(int sender, const ControlMessage& message, Waiting& waiting);
  void answer(int peer, const Waiting& waiting);
  [[noreturn]] void fail(Failure failure);
  void announce_failure(Failure failure);
  void throw_if_failed() const;
  void leave_quietly(std::string_view reason) noexcept;
  void close();

  const MPI_Comm data_;
  const MPI_Comm control_communicator_;
  std::unique_ptr<MpiControl> control_;  // set until the end
  const MpiMembers members_;
  const MpiOptions options_;
  int rank_ = 0;
  int size_ = 0;
  std::vector<bool> is_watched_;                     // [P] processes whose end can be detected
  std::vector<std::optional<ControlMessage>> left_;  // [P] goodbyes
  std::atomic<uint64_t> num_exchanges_ = 0;          // begun
  std::atomic<uint64_t> num_completed_ = 0;
  std::atomic<bool> has_left_ = false;
  std::optional<Failure> failure_;
  Traffic traffic_;
  const ExitNotice exit_notice_{[this] { leave_quietly("its process is exiting"); }};
};

}  // namespace crossdock::comm
