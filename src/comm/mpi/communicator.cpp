#include "comm/mpi/communicator.hpp"

#include <algorithm>
#include <utility>

#include "comm/exchange_arguments.hpp"
#include "comm/mpi/closing.hpp"
#include "comm/mpi/environment.hpp"
#include "comm/mpi/setup.hpp"
#include "core/check.hpp"

namespace crossdock::comm {
namespace {

constexpr int kTag = 0;

}  // namespace

MpiControl::MpiControl(MPI_Comm communicator)
    : communicator_(communicator), incoming_(std::make_shared<ControlMessage>()) {
  int size = 0;
  int rank = 0;
  MPI_Comm_size(communicator_, &size);
  MPI_Comm_rank(communicator_, &rank);
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) peers_.push_back(peer);
  }
  post_receive();
}

MpiControl::~MpiControl() {
  if (!mpi_is_running()) return;
  forget_what_was_sent();
  AbandonedRequests left_over;
  for (Outgoing& outgoing : outgoing_) {
    left_over.requests.push_back(outgoing.request);
    left_over.memory.push_back(std::move(outgoing.message));
  }
  if (receive_ != MPI_REQUEST_NULL) {
    MPI_Cancel(&receive_);
    left_over.requests.push_back(receive_);
    left_over.memory.push_back(std::move(incoming_));
  }
  keep_until_exit(std::move(left_over));
}

void MpiControl::post_receive() {
  check_mpi(MPI_Irecv(incoming_.get(), sizeof(ControlMessage), MPI_BYTE, MPI_ANY_SOURCE, kTag,
                      communicator_, &receive_),
            "MPI_Irecv");
}

void MpiControl::forget_what_was_sent() {
  std::erase_if(outgoing_, [](Outgoing& outgoing) {
    int done = 0;
    return MPI_Test(&outgoing.request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done != 0;
  });
}

MPI_Request MpiControl::post_send(int peer, const ControlMessage& message) const {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Isend(&message, sizeof message, MPI_BYTE, peer, kTag, communicator_, &request),
            "MPI_Isend", peer);
  return request;
}

void MpiControl::send(int peer, const ControlMessage& message) {
  auto kept = std::make_shared<ControlMessage>(message);
  const MPI_Request request = post_send(peer, *kept);
  outgoing_.push_back({request, std::move(kept)});
}

void MpiControl::send_to_all_others(const ControlMessage& message) {
  for (const int peer : peers_) send(peer, message);
}

void MpiControl::say_goodbye(const ControlMessage& message) const {
  auto kept = std::make_shared<ControlMessage>(message);
  AbandonedRequests unattended;
  for (const int peer : peers_) unattended.requests.push_back(post_send(peer, *kept));
  unattended.memory.push_back(std::move(kept));
  keep_until_exit(std::move(unattended));
}

void MpiControl::poll(const std::function<void(int sender, const ControlMessage&)>& handle) {
  if (!outgoing_.empty()) forget_what_was_sent();
  while (true) {
    int done = 0;
    MPI_Status status;
    check_mpi(MPI_Test(&receive_, &done, &status), "MPI_Test");
    if (done == 0) return;
    const ControlMessage message = *incoming_;
    post_receive();
    handle(status.MPI_SOURCE, message);
  }
}

MpiTransfers::MpiTransfers(Args args, const MpiOptions& options, Traffic& traffic)
    : args_(std::move(args)),
      options_(options),
      traffic_(traffic),
      sends_{.queue = ChunkQueue(options.chunk_bytes), .num_in_flight = 0},
      receives_{.queue = ChunkQueue(options.chunk_bytes), .num_in_flight = 0},
      num_missing_(args_.peer_bytes.size()),
      has_arrived_(args_.peer_bytes.size()) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(args_.communicator, &rank), "MPI_Comm_rank");
  const int size = static_cast<int>(args_.peer_bytes.size());
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank + distance) % size;
    const int from = (rank - distance + size) % size;
    num_missing_[static_cast<size_t>(to)] +=
        sends_.queue.add(to, args_.peer_bytes[static_cast<size_t>(to)].send_bytes);
    num_missing_[static_cast<size_t>(from)] +=
        receives_.queue.add(from, args_.peer_bytes[static_cast<size_t>(from)].recv_bytes);
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
  const PeerBytes& bytes = args_.peer_bytes[static_cast<size_t>(chunk.peer)];
  const auto num_bytes = static_cast<int>(chunk.num_bytes);
  MPI_Request request = MPI_REQUEST_NULL;
  if (is_send) {
    check_mpi(MPI_Isend(bytes.send + chunk.offset, num_bytes, MPI_BYTE, chunk.peer, args_.tag,
                        args_.communicator, &request),
              "MPI_Isend", chunk.peer);
  } else {
    check_mpi(MPI_Irecv(bytes.recv + chunk.offset, num_bytes, MPI_BYTE, chunk.peer, args_.tag,
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

namespace {

constexpr int kNumTags = 16384;  // MPI guarantees twice as many

int rank_in(MPI_Comm communicator) {
  int rank = 0;
  MPI_Comm_rank(communicator, &rank);
  return rank;
}

}  // namespace

MpiCommunicator::MpiCommunicator(MPI_Comm data, MPI_Comm control, Members members,
                                 const MpiOptions& options)
    : PolledCommunicator(rank_in(data), std::move(members)),
      data_(data),
      control_communicator_(control),
      control_(std::make_unique<MpiControl>(control)),
      options_(options) {}

MpiCommunicator::~MpiCommunicator() {
  leave_quietly(kPlainLeave);
  try {
    close();
  } catch (const std::exception&) {
    // The MPI communicators are then not freed.
  }
}

void MpiCommunicator::close() {
  if (!mpi_is_running() || !is_clean()) return;
  const ControlMessage own = goodbye_message({});
  left()[static_cast<size_t>(rank())] = own;
  free_when_all_have_left({.data = data_,
                           .control = control_communicator_,
                           .links = std::move(control_),
                           .left = std::move(left()),
                           .own_goodbye = own});
}

bool MpiCommunicator::is_open() const {
  return mpi_is_running();
}

void MpiCommunicator::note_failure() {
  note_mpi_failure();
}

std::unique_ptr<Transfers> MpiCommunicator::start(ExchangeArgs args, Traffic& traffic) {
  return std::make_unique<MpiTransfers>(
      MpiTransfers::Args{.communicator = data_,
                         .tag = static_cast<int>(args.number % kNumTags),
                         .peer_bytes = std::move(args.peer_bytes),
                         .memory = std::move(args.memory)},
      options_, traffic);
}

std::unique_ptr<Communicator> MpiCommunicator::subgroup(std::span<const int> ranks) {
  check_members(ranks, rank(), size());
  return make_subgroup({.parent = data_, .of = members(), .ranks = ranks}, options_);
}

}  // namespace crossdock::comm
