#include "comm/mpi/control.hpp"

#include <utility>

#include "comm/mpi/closing.hpp"
#include "comm/mpi/environment.hpp"

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

}  // namespace crossdock::comm
