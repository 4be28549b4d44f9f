#include "comm/mpi/communicator.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/exchange_arguments.hpp"
#include "comm/mpi/closing.hpp"
#include "comm/mpi/environment.hpp"
#include "comm/mpi/setup.hpp"
#include "core/check.hpp"

namespace crossdock::comm {
namespace {

using Kind = ControlMessage::Kind;

constexpr int kNumTags = 16384;  // MPI guarantees twice as many
constexpr std::chrono::milliseconds kProcessWatchInterval{50};

/// Yields during the first millisecond, when data may be microseconds away, then sleeps: there may
/// be more ranks than cores.
void pause(std::chrono::nanoseconds idle) {
  using std::chrono::microseconds;
  if (idle < microseconds(1000)) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(
        std::clamp<std::chrono::nanoseconds>(idle / 16, microseconds(50), microseconds(1000)));
  }
}

}  // namespace

MpiCommunicator::MpiCommunicator(MPI_Comm data, MPI_Comm control, MpiMembers members,
                                 const MpiOptions& options)
    : data_(data),
      control_communicator_(control),
      control_(std::make_unique<MpiControl>(control)),
      members_(std::move(members)),
      options_(options) {
  MPI_Comm_rank(data_, &rank_);
  MPI_Comm_size(data_, &size_);
  left_.resize(static_cast<size_t>(size_));
  const ProcessIdentity& self = members_.processes[static_cast<size_t>(rank_)];
  for (const ProcessIdentity& process : members_.processes) {
    is_watched_.push_back(is_visible(process, self));
  }
}

MpiCommunicator::~MpiCommunicator() {
  leave_quietly(kPlainLeave);
  try {
    close();
  } catch (const std::exception&) {
    // The MPI communicators are then not freed.
  }
}

void MpiCommunicator::close() {
  if (!mpi_is_running() || failure_ || num_exchanges_ != num_completed_) return;
  const ControlMessage own = left_message({}, num_completed_ + 1, num_exchanges_);
  left_[static_cast<size_t>(rank_)] = own;
  free_when_all_have_left({.data = data_,
                           .control = control_communicator_,
                           .channel = std::move(control_),
                           .left = std::move(left_),
                           .own_goodbye = own});
}

void MpiCommunicator::leave_quietly(std::string_view reason) noexcept {
  try {
    leave(reason);
  } catch (const std::exception&) {
    // The peers find out by their deadlines.
  }
}

void MpiCommunicator::leave(std::string_view reason) {
  if (!mpi_is_running() || has_left_.exchange(true)) return;
  control_->say_goodbye(left_message(reason, num_completed_ + 1, num_exchanges_));
}

void MpiCommunicator::abort(const Error& cause) {
  if (!failure_) announce_failure(failure_from(cause, rank_));
}

void MpiCommunicator::announce_failure(Failure failure) {
  failure_ = std::move(failure);
  note_mpi_failure();
  control_->send_to_all_others(abort_message(*failure_));
}

void MpiCommunicator::fail(Failure failure) {
  announce_failure(std::move(failure));
  throw to_error(*failure_, rank_, size_);
}

void MpiCommunicator::throw_if_failed() const {
  if (failure_) throw to_error(*failure_, rank_, size_);
}

std::unique_ptr<Communicator> MpiCommunicator::subgroup(std::span<const int> members) {
  check_members(members, rank_, size_);
  return make_subgroup({.parent = data_, .of = members_, .ranks = members}, options_);
}

void MpiCommunicator::all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                                   std::span<const int64_t> recv_offsets, const WaitContext& wait) {
  check_gather(send, recv, recv_offsets, rank_, size_);
  std::vector<MpiLane> lanes(static_cast<size_t>(size_));
  for (size_t peer = 0; peer < lanes.size(); ++peer) {
    lanes[peer] = {.send = send.data,
                   .send_bytes = send.num_bytes,
                   .recv = recv.data + recv_offsets[peer],
                   .recv_bytes = recv_offsets[peer + 1] - recv_offsets[peer]};
  }
  exchange(std::move(lanes), {send.owner, recv.owner}, wait);
}

void MpiCommunicator::all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                                   const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                                   const WaitContext& wait) {
  check_blocks("send", send, send_offsets, size_);
  check_blocks("recv", recv, recv_offsets, size_);
  std::vector<MpiLane> lanes(static_cast<size_t>(size_));
  for (size_t peer = 0; peer < lanes.size(); ++peer) {
    lanes[peer] = {.send = send.data + send_offsets[peer],
                   .send_bytes = send_offsets[peer + 1] - send_offsets[peer],
                   .recv = recv.data + recv_offsets[peer],
                   .recv_bytes = recv_offsets[peer + 1] - recv_offsets[peer]};
  }
  exchange(std::move(lanes), {send.owner, recv.owner}, wait);
}

void MpiCommunicator::exchange(std::vector<MpiLane> lanes,
                               std::vector<std::shared_ptr<const void>> memory,
                               const WaitContext& wait) {
  throw_if_failed();
  const MpiLane own = lanes[static_cast<size_t>(rank_)];
  if (own.send_bytes != own.recv_bytes) {
    throw Error(ErrorCode::kInternal, concat("rank ", rank_, " sends itself ", own.send_bytes,
                                             " bytes and expects ", own.recv_bytes));
  }
  if (own.send_bytes > 0 && own.send != own.recv) {
    std::memcpy(own.recv, own.send, static_cast<size_t>(own.send_bytes));
  }
  for (int peer = 0; peer < size_; ++peer) {
    count_bytes(traffic_, topology(), rank_, peer, lanes[static_cast<size_t>(peer)].send_bytes);
  }
  ++num_exchanges_;
  try {
    MpiTransfers transfers({.communicator = data_,
                            .tag = static_cast<int>(num_exchanges_ % kNumTags),
                            .lanes = std::move(lanes),
                            .memory = std::move(memory)},
                           options_, traffic_);
    Waiting waiting{
        .wait = wait, .transfers = transfers, .clock = MpiWaitClock(wait), .inquiry = {}};
    complete(waiting);
  } catch (const Error& error) {
    if (failure_) throw;
    const Error located(error.code(), concat("rank ", rank_, " of ", size_, ": ", error.what()),
                        {error.context().culprit, wait.sequence, wait.operation});
    abort(located);
    throw located;
  }
  ++num_completed_;
}

void MpiCommunicator::complete(Waiting& waiting) {
  // Messages that arrived between exchanges come first.
  control_->poll(
      [&](int sender, const ControlMessage& message) { handle(sender, message, waiting); });
  throw_if_failed();
  while (true) {
    const bool moved = waiting.transfers.advance();
    if (waiting.transfers.is_done()) return;
    if (moved) {
      waiting.clock.note_progress();
      waiting.inquiry.reset();
      continue;
    }
    look_for_failures(waiting);
    pause(waiting.clock.idle());
  }
}

void MpiCommunicator::look_for_failures(Waiting& waiting) {
  control_->poll(
      [&](int sender, const ControlMessage& message) { handle(sender, message, waiting); });
  throw_if_failed();
  for (int peer = 0; peer < size_; ++peer) {
    const auto& goodbye = left_[static_cast<size_t>(peer)];
    if (goodbye && goodbye->exchange <= num_exchanges_ && waiting.transfers.is_pending(peer)) {
      fail(left_failure(peer, goodbye->text.data(), waiting.wait));
    }
  }
  look_for_dead_processes(waiting);
  const auto waited = waiting.clock.expired(waiting.transfers);
  if (!waited) return;
  if (!waiting.inquiry) {
    waiting.inquiry.emplace(MpiInquiry::Self{.rank = rank_,
                                             .exchange = num_exchanges_,
                                             .pending = waiting.transfers.pending_peers()},
                            *control_);
  } else if (waiting.inquiry->is_over()) {
    throw_timeout(waiting, *waited);
  }
}

void MpiCommunicator::look_for_dead_processes(Waiting& waiting) {
  const auto now = Clock::now();
  const bool is_idle = waiting.clock.idle() > kProcessWatchInterval;  // data has stopped arriving
  if (!is_idle || now - waiting.last_watch < kProcessWatchInterval) return;
  waiting.last_watch = now;
  for (const int peer : waiting.transfers.pending_peers()) {
    const auto p = static_cast<size_t>(peer);
    if (!is_watched_[p] || !has_ended(members_.processes[p])) continue;
    fail(left_failure(peer, concat("its process, pid ", members_.processes[p].pid, ", has ended"),
                      waiting.wait));
  }
}

void MpiCommunicator::throw_timeout(Waiting& waiting, std::chrono::nanoseconds waited) {
  const auto verdict = waiting.inquiry->verdict();
  WaitContext missed_at = waiting.wait;
  if (verdict.first_missed_by) {
    missed_at.operation = interned(verdict.first_missed_by->operation.data());
    missed_at.sequence = verdict.first_missed_by->sequence;
  }
  fail(late_failure(
      {.culprit = verdict.culprit,
       .reporter = rank_,
       .waited = waited,
       .has_arrived = !verdict.first_missed_by && waiting.transfers.has_arrived(verdict.culprit)},
      missed_at));
}

void MpiCommunicator::handle(int sender, const ControlMessage& message, Waiting& waiting) {
  switch (message.kind) {
    case Kind::kAbort:
      if (failure_) return;
      failure_ = failure_from(message);
      note_mpi_failure();
      return;
    case Kind::kLeft:
      left_[static_cast<size_t>(sender)] = message;
      return;
    case Kind::kQuestion:
      answer(sender, waiting);
      return;
    case Kind::kWaiting:
      if (waiting.inquiry) waiting.inquiry->note_answer(sender, message);
      return;
  }
}

void MpiCommunicator::answer(int peer, const Waiting& waiting) {
  ControlMessage message;
  message.kind = Kind::kWaiting;
  message.exchange = num_exchanges_;
  message.sequence = waiting.wait.sequence;
  std::strncpy(message.operation.data(), waiting.wait.operation, message.operation.size() - 1);
  for (const int pending : waiting.transfers.pending_peers()) {
    if (message.num_pending == static_cast<int32_t>(ControlMessage::kMaxPending)) break;
    message.pending[static_cast<size_t>(message.num_pending++)] = pending;
  }
  control_->send(peer, message);
}

}  // namespace crossdock::comm
