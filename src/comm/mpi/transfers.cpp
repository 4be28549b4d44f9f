#include "comm/mpi/transfers.hpp"

#include <algorithm>
#include <utility>

#include "comm/mpi/closing.hpp"
#include "comm/mpi/environment.hpp"
#include "core/check.hpp"

namespace crossdock::comm {

MpiTransfers::MpiTransfers(Args args, const MpiOptions& options, Traffic& traffic)
    : args_(std::move(args)),
      options_(options),
      traffic_(traffic),
      sends_{.queue = ChunkQueue(options.chunk_bytes), .num_in_flight = 0},
      receives_{.queue = ChunkQueue(options.chunk_bytes), .num_in_flight = 0},
      num_missing_(args_.lanes.size()),
      has_arrived_(args_.lanes.size()) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(args_.communicator, &rank), "MPI_Comm_rank");
  const int size = static_cast<int>(args_.lanes.size());
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank + distance) % size;
    const int from = (rank - distance + size) % size;
    num_missing_[static_cast<size_t>(to)] +=
        sends_.queue.add(to, args_.lanes[static_cast<size_t>(to)].send_bytes);
    num_missing_[static_cast<size_t>(from)] +=
        receives_.queue.add(from, args_.lanes[static_cast<size_t>(from)].recv_bytes);
  }
}

MpiTransfers::~MpiTransfers() {
  if (!requests_.empty()) keep_until_exit({std::move(requests_), std::move(args_.memory)});
}

bool MpiTransfers::advance() {
  const int receive_window = options_.max_in_flight / 2;
  const int send_window = options_.max_in_flight - receive_window;
  // Sends first: posting a receive may answer a message that has already been announced, and the
  // peer then fills the link with data. Sends announced after that answer would wait for that data,
  // and the two directions would take turns on the link.
  while (!sends_.queue.empty() && sends_.num_in_flight < send_window) post(sends_, true);
  while (!receives_.queue.empty() && receives_.num_in_flight < receive_window) {
    post(receives_, false);
  }
  return take_completed();
}

void MpiTransfers::post(Direction& direction, bool is_send) {
  const ChunkQueue::Chunk chunk = direction.queue.take();
  const Lane& lane = args_.lanes[static_cast<size_t>(chunk.peer)];
  const auto num_bytes = static_cast<int>(chunk.num_bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  if (is_send) {
    check_mpi(MPI_Isend(lane.send + chunk.offset, num_bytes, MPI_BYTE, chunk.peer, args_.tag,
                        args_.communicator, &request),
              "MPI_Isend", chunk.peer);
  } else {
    check_mpi(MPI_Irecv(lane.recv + chunk.offset, num_bytes, MPI_BYTE, chunk.peer, args_.tag,
                        args_.communicator, &request),
              "MPI_Irecv", chunk.peer);
  }
  requests_.push_back(request);
  messages_.push_back({.peer = chunk.peer, .is_send = is_send, .num_bytes = num_bytes});
  ++direction.num_in_flight;
  ++traffic_.requests_posted;
  traffic_.max_requests_in_flight =
      std::max(traffic_.max_requests_in_flight, static_cast<int64_t>(requests_.size()));
}

bool MpiTransfers::take_completed() {
  if (requests_.empty()) return false;
  completed_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int num_completed = 0;
  const int result = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(),
                                  &num_completed, completed_.data(), statuses_.data());
  if (result != MPI_ERR_IN_STATUS) check_mpi(result, "MPI_Testsome");
  if (num_completed <= 0) return false;
  for (int i = 0; i < num_completed; ++i) {
    const auto index = static_cast<size_t>(completed_[static_cast<size_t>(i)]);
    take(messages_[index], statuses_[static_cast<size_t>(i)], result == MPI_ERR_IN_STATUS);
  }
  size_t kept = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    requests_[kept] = requests_[i];
    messages_[kept++] = messages_[i];
  }
  requests_.resize(kept);
  messages_.resize(kept);
  return true;
}

void MpiTransfers::take(const Message& message, const MPI_Status& status, bool failed) {
  if (failed) {
    check_mpi(status.MPI_ERROR, message.is_send ? "MPI_Isend" : "MPI_Irecv", message.peer);
  }
  const auto peer = static_cast<size_t>(message.peer);
  --num_missing_[peer];
  --(message.is_send ? sends_ : receives_).num_in_flight;
  if (message.is_send) return;  // a small send completes without the receiver
  has_arrived_[peer] = true;
  int num_bytes = 0;
  check_mpi(MPI_Get_count(&status, MPI_BYTE, &num_bytes), "MPI_Get_count");
  if (num_bytes != message.num_bytes) {
    throw Error(ErrorCode::kInternal,
                concat("rank ", message.peer, " sent a message of ", num_bytes, " bytes where ",
                       message.num_bytes, " were expected"),
                {.culprit = message.peer});
  }
}

}  // namespace crossdock::comm
