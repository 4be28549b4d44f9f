#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/failure.hpp"
#include "comm/polled/control_message.hpp"
#include "comm/polled/process_end.hpp"
#include "comm/polled/transfers.hpp"
#include "comm/waiting.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// The ranks of a communicator, as found during setup.
struct Members {
  Topology topology;
  std::vector<ProcessIdentity> processes;  // [P]
};

/// The members at `ranks`, in that order.
Members subset_of(const Members& members, std::span<const int> ranks);

/// A communicator between processes. Every exchange is a set of transfers that are polled, together
/// with the control messages of the peers, until they are done, a peer has failed or a deadline has
/// passed. It makes no blocking call. Derived classes move the bytes and the control messages.
class PolledCommunicator : public Communicator {
 public:
  PolledCommunicator(const PolledCommunicator&) = delete;
  PolledCommunicator& operator=(const PolledCommunicator&) = delete;

  int rank() const final { return rank_; }
  int size() const final { return size_; }
  const Topology& topology() const final { return members_.topology; }
  Traffic traffic() const final { return traffic_; }

  void all_gather_v(const SharedBytes& send, const SharedBytes& recv,
                    std::span<const int64_t> recv_offsets, const WaitContext& wait) final;
  void all_to_all_v(const SharedBytes& send, std::span<const int64_t> send_offsets,
                    const SharedBytes& recv, std::span<const int64_t> recv_offsets,
                    const WaitContext& wait) final;
  void abort(const Error& cause) final;
  void leave(std::string_view reason) final;

  /// Why it has failed, if it has.
  const std::optional<Failure>& failure() const { return failure_; }

 protected:
  struct ExchangeArgs {
    uint64_t number = 0;                              // of the exchange, from 1
    std::vector<PeerBytes> peer_bytes;                // [P]; this rank's own is already done
    std::vector<std::shared_ptr<const void>> memory;  // keeps the memory of the bytes alive
  };

  PolledCommunicator(int rank, Members members);

  /// An all_gather_v; this rank's own block is already done.
  struct GatherArgs {
    uint64_t number = 0;  // of the exchange, from 1
    const SharedBytes& send;
    const SharedBytes& recv;
    std::span<const int64_t> recv_offsets;  // [P + 1]
  };

  virtual ControlLinks& control() = 0;
  virtual std::unique_ptr<Transfers> start(ExchangeArgs args, Traffic& traffic) = 0;
  /// (optional) Whether start_gather, which need not allocate, carries out an all_gather_v with
  /// these offsets. Must be the same on every rank.
  virtual bool has_quick_gather(std::span<const int64_t> /*recv_offsets*/) const { return false; }
  /// (optional, with has_quick_gather) The result is valid until the next exchange.
  virtual Transfers* start_gather(const GatherArgs& /*args*/) { return nullptr; }
  /// (optional) Called when nothing has moved for `idle`. By default yields during the first
  /// millisecond, when data may be microseconds away, then sleeps: there may be more ranks than
  /// cores.
  virtual void pause(std::chrono::nanoseconds idle);
  /// (optional) Why a peer can no longer take part, if that is known. The end of a visible process
  /// is detected without it.
  virtual std::optional<std::string> end_of(int /*peer*/) const { return std::nullopt; }
  /// (optional) The kAbort message of a peer that could not take part from the beginning and left
  /// it where only this finds it.
  virtual std::optional<ControlMessage> refusal() const { return std::nullopt; }
  /// (optional) Called often during a wait; throws to end it.
  virtual void check_interrupt(const WaitContext& /*wait*/) {}
  /// (optional) Called when the communicator has failed.
  virtual void note_failure() {}
  /// (optional) Whether messages can be sent at all.
  virtual bool is_open() const { return true; }

  /// Leaves without throwing. Derived destructors call it before they close what `control` uses.
  void leave_quietly(std::string_view reason) noexcept;
  /// Whether all exchanges so far have completed.
  bool is_clean() const { return !failure_ && num_exchanges_ == num_completed_; }
  ControlMessage goodbye_message(std::string_view reason) const {
    return left_message(reason, num_completed_ + 1, num_exchanges_);
  }
  /// The goodbyes of the peers so far [P].
  std::vector<std::optional<ControlMessage>>& left() { return left_; }
  const Members& members() const { return members_; }

 private:
  struct Ending {  // of a peer
    int peer = 0;
    Inquiry inquiry;
    Clock::time_point begin;
  };
  struct Waiting {  // an exchange in progress
    const WaitContext& wait;
    Transfers& transfers;
    WaitClock clock;
    std::optional<Inquiry> inquiry{};
    std::optional<Ending> ending{};
    Clock::time_point last_watch = Clock::now();
    OnceNotice notice{wait.on_wait, wait.notice_after};
  };

  void gather_quickly(const SharedBytes& send, const SharedBytes& recv,
                      std::span<const int64_t> recv_offsets, const WaitContext& wait);
  void exchange(std::vector<PeerBytes> peer_bytes, std::vector<std::shared_ptr<const void>> memory,
                const WaitContext& wait);
  template <typename Start>
  void carry_out(const Start& start_transfers, const WaitContext& wait);
  void copy_own_bytes(const PeerBytes& own) const;
  void complete(Waiting& waiting);
  void poll_control(Waiting& waiting);
  void look_for_failures(Waiting& waiting);
  void ask_about(int ended, Waiting& waiting);
  void report_ending(Waiting& waiting);
  void look_for_dead_processes(Waiting& waiting);
  void tell_of_long_wait(Waiting& waiting) const;
  [[noreturn]] void throw_timeout(Waiting& waiting, std::chrono::nanoseconds waited);
  void handle(int sender, const ControlMessage& message, Waiting& waiting);
  void answer(int peer, const Waiting& waiting);
  [[noreturn]] void fail(Failure failure);
  void announce_failure(Failure failure);
  void throw_if_failed() const;

  const Members members_;
  const int rank_;
  const int size_;
  std::vector<bool> is_watched_;                     // [P] processes whose end can be detected
  std::vector<std::optional<ControlMessage>> left_;  // [P] goodbyes
  std::atomic<uint64_t> num_exchanges_ = 0;          // begun
  std::atomic<uint64_t> num_completed_ = 0;
  std::atomic<bool> has_left_ = false;
  std::optional<Failure> failure_;
  Traffic traffic_;
};

}  // namespace crossdock::comm
