#include "comm/polled/communicator.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "comm/exchange_arguments.hpp"
#include "core/check.hpp"

namespace crossdock::comm {
namespace {

using Kind = ControlMessage::Kind;

constexpr std::chrono::milliseconds kProcessWatchInterval{50};
constexpr std::chrono::milliseconds kEndingTime{100};  // for answers once a peer has ended

}  // namespace

Members subset_of(const Members& members, std::span<const int> ranks) {
  Members chosen{.topology = members.topology.subset(ranks), .processes = {}};
  for (const int rank : ranks) {
    chosen.processes.push_back(members.processes[static_cast<size_t>(rank)]);
  }
  return chosen;
}

PolledCommunicator::PolledCommunicator(int rank, Members members)
    : members_(std::move(members)),
      rank_(rank),
      size_(static_cast<int>(members_.processes.size())),
      left_(members_.processes.size()) {
  const ProcessIdentity& self = members_.processes[static_cast<size_t>(rank_)];
  for (const ProcessIdentity& process : members_.processes) {
    is_watched_.push_back(is_visible(process, self));
  }
}

void PolledCommunicator::pause(std::chrono::nanoseconds idle) {
  using std::chrono::microseconds;
  if (idle < microseconds(1000)) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(
        std::clamp<std::chrono::nanoseconds>(idle / 16, microseconds(50), microseconds(1000)));
  }
}

void PolledCommunicator::leave_quietly(std::string_view reason) noexcept {
  try {
    leave(reason);
  } catch (const std::exception&) {
    // The peers find out by their deadlines.
  }
}

void PolledCommunicator::leave(std::string_view reason) {
  if (!is_open() || has_left_.exchange(true)) return;
  control().say_goodbye(goodbye_message(reason));
}

void PolledCommunicator::abort(const Error& cause) {
  if (!failure_) announce_failure(failure_from(cause, rank_));
}

void PolledCommunicator::announce_failure(Failure failure) {
  failure_ = std::move(failure);
  note_failure();
  control().send_to_all_others(abort_message(*failure_));
}

void PolledCommunicator::fail(Failure failure) {
  announce_failure(std::move(failure));
  throw to_error(*failure_, rank_, size_);
}

void PolledCommunicator::throw_if_failed() const {
  if (failure_) throw to_error(*failure_, rank_, size_);
}

void PolledCommunicator::all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                                      std::span<const int64_t> recv_offsets,
                                      const WaitContext& wait) {
  check_gather(send, recv, recv_offsets, rank_, size_);
  if (has_quick_gather(recv_offsets)) {
    gather_quickly(send, recv, recv_offsets, wait);
    return;
  }
  std::vector<PeerBytes> peer_bytes(static_cast<size_t>(size_));
  for (size_t peer = 0; peer < peer_bytes.size(); ++peer) {
    peer_bytes[peer] = {.send = send.data,
                        .send_bytes = send.num_bytes,
                        .recv = recv.data + recv_offsets[peer],
                        .recv_bytes = recv_offsets[peer + 1] - recv_offsets[peer]};
  }
  exchange(std::move(peer_bytes), {send.owner, recv.owner}, wait);
}

void PolledCommunicator::gather_quickly(const SharedBytes& send, const SharedBytes& recv,
                                        std::span<const int64_t> recv_offsets,
                                        const WaitContext& wait) {
  throw_if_failed();
  copy_own_bytes({.send = send.data,
                  .send_bytes = send.num_bytes,
                  .recv = recv.data + recv_offsets[static_cast<size_t>(rank_)],
                  .recv_bytes = send.num_bytes});
  for (int peer = 0; peer < size_; ++peer) {
    count_bytes(traffic_, topology(), rank_, peer, send.num_bytes);
  }
  carry_out(
      [&](uint64_t number) {
        return start_gather(
            {.number = number, .send = send, .recv = recv, .recv_offsets = recv_offsets});
      },
      wait);
}

void PolledCommunicator::all_to_all_v(const SharedBytes& send,
                                      std::span<const int64_t> send_offsets,
                                      const SharedBytes& recv,
                                      std::span<const int64_t> recv_offsets,
                                      const WaitContext& wait) {
  check_blocks("send", send, send_offsets, size_);
  check_blocks("recv", recv, recv_offsets, size_);
  std::vector<PeerBytes> peer_bytes(static_cast<size_t>(size_));
  for (size_t peer = 0; peer < peer_bytes.size(); ++peer) {
    peer_bytes[peer] = {.send = send.data + send_offsets[peer],
                        .send_bytes = send_offsets[peer + 1] - send_offsets[peer],
                        .recv = recv.data + recv_offsets[peer],
                        .recv_bytes = recv_offsets[peer + 1] - recv_offsets[peer]};
  }
  exchange(std::move(peer_bytes), {send.owner, recv.owner}, wait);
}

void PolledCommunicator::copy_own_bytes(const PeerBytes& own) const {
  if (own.send_bytes != own.recv_bytes) {
    throw Error(ErrorCode::kInternal, concat("rank ", rank_, " sends itself ", own.send_bytes,
                                             " bytes and expects ", own.recv_bytes));
  }
  if (own.send_bytes > 0 && own.send != own.recv) {
    std::memcpy(own.recv, own.send, static_cast<size_t>(own.send_bytes));
  }
}

void PolledCommunicator::exchange(std::vector<PeerBytes> peer_bytes,
                                  std::vector<std::shared_ptr<const void>> memory,
                                  const WaitContext& wait) {
  throw_if_failed();
  copy_own_bytes(peer_bytes[static_cast<size_t>(rank_)]);
  for (int peer = 0; peer < size_; ++peer) {
    count_bytes(traffic_, topology(), rank_, peer,
                peer_bytes[static_cast<size_t>(peer)].send_bytes);
  }
  carry_out(
      [&](uint64_t number) {
        return start(
            {.number = number, .peer_bytes = std::move(peer_bytes), .memory = std::move(memory)},
            traffic_);
      },
      wait);
}

template <typename Start>
void PolledCommunicator::carry_out(const Start& start_transfers, const WaitContext& wait) {
  const uint64_t number = ++num_exchanges_;
  try {
    const auto transfers = start_transfers(number);
    Waiting waiting{.wait = wait, .transfers = *transfers, .clock = WaitClock(wait)};
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

void PolledCommunicator::complete(Waiting& waiting) {
  poll_control(waiting);  // messages that arrived between exchanges come first
  while (true) {
    const bool moved = waiting.transfers.advance();
    if (waiting.transfers.is_done()) return;
    if (moved) {
      waiting.clock.note_progress();
      waiting.inquiry.reset();
      check_interrupt(waiting.wait);
      continue;
    }
    look_for_failures(waiting);
    pause(waiting.clock.idle());
  }
}

void PolledCommunicator::poll_control(Waiting& waiting) {
  control().poll(
      [&](int sender, const ControlMessage& message) { handle(sender, message, waiting); });
  throw_if_failed();
}

void PolledCommunicator::look_for_failures(Waiting& waiting) {
  poll_control(waiting);
  check_interrupt(waiting.wait);
  for (int peer = 0; peer < size_; ++peer) {
    if (!waiting.transfers.is_pending(peer)) continue;
    const auto& goodbye = left_[static_cast<size_t>(peer)];
    if (goodbye && goodbye->exchange <= num_exchanges_) {
      fail(left_failure(peer, goodbye->text.data(), waiting.wait));
    }
    if (const auto reason = end_of(peer); reason && !waiting.ending) ask_about(peer, waiting);
  }
  if (waiting.ending) report_ending(waiting);
  look_for_dead_processes(waiting);
  tell_of_long_wait(waiting);
  const auto waited = waiting.clock.expired(waiting.transfers);
  if (!waited) return;
  if (!waiting.inquiry) {
    waiting.inquiry.emplace(Inquiry::Self{.rank = rank_,
                                          .exchange = num_exchanges_,
                                          .pending = waiting.transfers.pending_peers()},
                            control());
  } else if (waiting.inquiry->is_over()) {
    throw_timeout(waiting, *waited);
  }
}

// A peer has ended. Other ranks may miss it in an earlier call than this rank, and all must report
// the same call, so this asks them where they are.
void PolledCommunicator::ask_about(int ended, Waiting& waiting) {
  std::vector<int> others;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && !end_of(peer)) others.push_back(peer);
  }
  waiting.ending.emplace(Ending{
      .peer = ended,
      .inquiry = Inquiry({.rank = rank_, .exchange = num_exchanges_, .pending = std::move(others)},
                         control()),
      .begin = Clock::now()});
}

void PolledCommunicator::report_ending(Waiting& waiting) {
  const auto& [ended, inquiry, begin] = *waiting.ending;
  if (!waiting.transfers.is_pending(ended)) {
    waiting.ending.reset();  // its last bytes have just arrived
    return;
  }
  if (!inquiry.has_all_answers() && Clock::now() - begin < kEndingTime) return;
  WaitContext missed_at = waiting.wait;
  if (const auto first = inquiry.first_to_miss(ended)) {
    missed_at.operation = interned(first->operation.data());
    missed_at.sequence = first->sequence;
  }
  fail(left_failure(ended, end_of(ended).value_or("it has ended"), missed_at));
}

void PolledCommunicator::look_for_dead_processes(Waiting& waiting) {
  const auto now = Clock::now();
  const bool is_idle = waiting.clock.idle() > kProcessWatchInterval;  // data has stopped arriving
  if (!is_idle || now - waiting.last_watch < kProcessWatchInterval) return;
  waiting.last_watch = now;
  const auto fail_if_refused = [this] {
    if (const auto found = refusal()) fail(failure_from(*found));
  };
  fail_if_refused();
  for (const int peer : waiting.transfers.pending_peers()) {
    const auto p = static_cast<size_t>(peer);
    if (!is_watched_[p] || !has_ended(members_.processes[p])) continue;
    poll_control(waiting);  // its last messages
    fail_if_refused();
    fail(left_failure(peer, concat("its process, pid ", members_.processes[p].pid, ", has ended"),
                      waiting.wait));
  }
}

void PolledCommunicator::tell_of_long_wait(Waiting& waiting) const {
  const auto idle = waiting.clock.idle();
  if (!waiting.notice.is_due(idle)) return;
  waiting.notice.say({.rank = rank_,
                      .size = size_,
                      .awaited = waiting.transfers.pending_peers(),
                      .operation = waiting.wait.operation,
                      .sequence = waiting.wait.sequence,
                      .waited = idle,
                      .left = waiting.clock.left(waiting.transfers)});
}

void PolledCommunicator::throw_timeout(Waiting& waiting, std::chrono::nanoseconds waited) {
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

void PolledCommunicator::handle(int sender, const ControlMessage& message, Waiting& waiting) {
  switch (message.kind) {
    case Kind::kAbort:
      // Passed on: if the sender has not reached all ranks yet, they hear of the failure before
      // they hear that this rank has left because of it.
      if (!failure_) announce_failure(failure_from(message));
      return;
    case Kind::kLeft:
      left_[static_cast<size_t>(sender)] = message;
      return;
    case Kind::kQuestion:
      answer(sender, waiting);
      return;
    case Kind::kWaiting:
      if (waiting.inquiry) waiting.inquiry->note_answer(sender, message);
      if (waiting.ending) waiting.ending->inquiry.note_answer(sender, message);
      return;
  }
}

void PolledCommunicator::answer(int peer, const Waiting& waiting) {
  ControlMessage message;
  message.kind = Kind::kWaiting;
  message.exchange = num_exchanges_;
  message.sequence = waiting.wait.sequence;
  std::strncpy(message.operation.data(), waiting.wait.operation, message.operation.size() - 1);
  for (const int pending : waiting.transfers.pending_peers()) {
    if (message.num_pending == static_cast<int32_t>(ControlMessage::kMaxPending)) break;
    message.pending[static_cast<size_t>(message.num_pending++)] = pending;
  }
  control().send(peer, message);
}

}  // namespace crossdock::comm
