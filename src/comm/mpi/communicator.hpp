#pragma once

#include <mpi.h>

#include <memory>
#include <span>
#include <string_view>

#include "comm/exit_notice.hpp"
#include "comm/mpi/control.hpp"
#include "comm/polled_communicator.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::comm {

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
  ControlChannel& control() override { return *control_; }
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
