#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/transfers.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::comm {

/// The messages of one exchange with MPI, sent and received in chunks with at most max_in_flight
/// pending requests, whatever their sizes: half of them receives and half sends, so neither can
/// block the other.
class MpiTransfers final : public Transfers {
 public:
  struct Args {
    MPI_Comm communicator = MPI_COMM_NULL;
    int tag = 0;
    std::vector<Lane> lanes;                          // [P]; this rank's own is ignored
    std::vector<std::shared_ptr<const void>> memory;  // keeps the memory of the lanes alive
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

}  // namespace crossdock::comm
