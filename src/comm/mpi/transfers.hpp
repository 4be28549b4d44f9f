#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "crossdock/extend/communicator.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock::comm {

/// The bytes that one rank exchanges with one peer.
struct MpiLane {
  const std::byte* send = nullptr;
  int64_t send_bytes = 0;
  std::byte* recv = nullptr;
  int64_t recv_bytes = 0;
};

/// The messages of one exchange, sent and received in chunks with at most max_in_flight pending
/// requests for any sizes: half of them receives and half sends, so that neither can block the
/// other.
///
/// Chunk j of all peers comes before chunk j + 1 of any, and peers come in the order of their
/// distance (rank + 1, rank + 2, ... for sends, rank - 1, rank - 2, ... for receives). All ranks
/// follow this order of (chunk, distance), so the first incomplete message in it has been posted on
/// both sides: there is always progress, even with the smallest limit on requests.
class MpiTransfers {
 public:
  struct Args {
    MPI_Comm communicator = MPI_COMM_NULL;
    int tag = 0;
    std::vector<MpiLane> lanes;                       // [P]; this rank's own is ignored
    std::vector<std::shared_ptr<const void>> memory;  // keeps the memory of the lanes alive
  };
  MpiTransfers(Args args, const MpiOptions& options, Traffic& traffic);
  /// Abandons pending requests: they are kept, with their memory, until exit.
  ~MpiTransfers();
  MpiTransfers(const MpiTransfers&) = delete;
  MpiTransfers& operator=(const MpiTransfers&) = delete;

  bool is_done() const { return sends_.empty() && receives_.empty() && requests_.empty(); }

  /// Posts what the limit allows and takes what has completed. Returns whether anything has.
  bool advance();

  /// Peers with pending messages, ascending.
  std::vector<int> pending_peers() const;
  bool is_pending(int peer) const { return num_missing_[static_cast<size_t>(peer)] > 0; }
  /// Whether anything has arrived from this peer, so that it is known to take part.
  bool has_arrived(int peer) const { return has_arrived_[static_cast<size_t>(peer)]; }

 private:
  struct Message {
    int peer = 0;
    bool is_send = false;
    int num_bytes = 0;
  };
  struct Cursor {  // what remains to be exchanged with a peer in one direction
    int peer = 0;
    int64_t done_bytes = 0;
    int64_t num_bytes = 0;
  };
  /// Cursors in the order of their next chunks.
  struct Queue {
    std::vector<Cursor> cursors;
    size_t next = 0;
    int num_in_flight = 0;
    bool empty() const { return cursors.empty(); }
  };

  void enqueue(Queue& queue, int peer, int64_t num_bytes);
  void post(Queue& queue, bool is_send);
  bool take_completed();
  void take(const Message& message, const MPI_Status& status, bool failed);

  Args args_;
  const MpiOptions options_;
  Traffic& traffic_;
  Queue sends_;
  Queue receives_;
  std::vector<MPI_Request> requests_;  // pending
  std::vector<Message> messages_;      // of requests_
  std::vector<int> completed_;         // scratch of MPI_Testsome
  std::vector<MPI_Status> statuses_;
  std::vector<int64_t> num_missing_;  // [P] incomplete chunks
  std::vector<bool> has_arrived_;     // [P]
};

}  // namespace crossdock::comm
