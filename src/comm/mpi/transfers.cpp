#include "comm/mpi/transfers.hpp"

#include <algorithm>
#include <utility>

#include "comm/mpi/abandoned_requests.hpp"
#include "comm/mpi/environment.hpp"
#include "core/check.hpp"

namespace crossdock::comm {

MpiTransfers::MpiTransfers(Args args, const MpiOptions& options, Traffic& traffic)
    : args_(std::move(args)),
      options_(options),
      traffic_(traffic),
      num_missing_(args_.lanes.size()),
      has_arrived_(args_.lanes.size()) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(args_.communicator, &rank), "MPI_Comm_rank");
  const int size = static_cast<int>(args_.lanes.size());
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank + distance) % size;
    const int from = (rank - distance + size) % size;
    enqueue(sends_, to, args_.lanes[static_cast<size_t>(to)].send_bytes);
    enqueue(receives_, from, args_.lanes[static_cast<size_t>(from)].recv_bytes);
  }
}

MpiTransfers::~MpiTransfers() {
  if (!requests_.empty()) keep_until_exit({std::move(requests_), std::move(args_.memory)});
}

void MpiTransfers::enqueue(Queue& queue, int peer, int64_t num_bytes) {
  if (num_bytes == 0) return;
  queue.cursors.push_back({.peer = peer, .done_bytes = 0, .num_bytes = num_bytes});
  num_missing_[static_cast<size_t>(peer)] +=
      (num_bytes + options_.chunk_bytes - 1) / options_.chunk_bytes;
}

bool MpiTransfers::advance() {
  const int receive_window = options_.max_in_flight / 2;
  const int send_window = options_.max_in_flight - receive_window;
  // Sends first: posting a receive may answer a message that has already been announced, and the
  // peer then fills the link with data. Sends announced after that answer would wait for that data,
  // and the two directions would take turns on the link.
  while (!sends_.empty() && sends_.num_in_flight < send_window) post(sends_, true);
  while (!receives_.empty() && receives_.num_in_flight < receive_window) post(receives_, false);
  return take_completed();
}

void MpiTransfers::post(Queue& queue, bool is_send) {
  Cursor& cursor = queue.cursors[queue.next];
  const MpiLane& lane = args_.lanes[static_cast<size_t>(cursor.peer)];
  const auto num_bytes =
      static_cast<int>(std::min(options_.chunk_bytes, cursor.num_bytes - cursor.done_bytes));
  MPI_Request request = MPI_REQUEST_NULL;
  if (is_send) {
    check_mpi(MPI_Isend(lane.send + cursor.done_bytes, num_bytes, MPI_BYTE, cursor.peer, args_.tag,
                        args_.communicator, &request),
              "MPI_Isend", cursor.peer);
  } else {
    check_mpi(MPI_Irecv(lane.recv + cursor.done_bytes, num_bytes, MPI_BYTE, cursor.peer, args_.tag,
                        args_.communicator, &request),
              "MPI_Irecv", cursor.peer);
  }
  requests_.push_back(request);
  messages_.push_back({.peer = cursor.peer, .is_send = is_send, .num_bytes = num_bytes});
  ++queue.num_in_flight;
  ++traffic_.requests_posted;
  traffic_.max_requests_in_flight =
      std::max(traffic_.max_requests_in_flight, static_cast<int64_t>(requests_.size()));

  cursor.done_bytes += num_bytes;
  if (cursor.done_bytes == cursor.num_bytes) {
    queue.cursors.erase(queue.cursors.begin() + static_cast<ptrdiff_t>(queue.next));
  } else {
    ++queue.next;
  }
  if (queue.next == queue.cursors.size()) queue.next = 0;
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

std::vector<int> MpiTransfers::pending_peers() const {
  std::vector<int> peers;
  for (size_t peer = 0; peer < num_missing_.size(); ++peer) {
    if (num_missing_[peer] > 0) peers.push_back(static_cast<int>(peer));
  }
  return peers;
}

}  // namespace crossdock::comm
