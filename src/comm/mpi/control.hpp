#pragma once

#include <mpi.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/failure.hpp"

namespace crossdock::comm {

/// A message between ranks besides the data. Sent as it is in memory; small enough for MPI to send
/// it before the receiver asks for it.
struct ControlMessage {
  enum class Kind : int32_t {
    kAbort,     // the sender gave up: code, culprit, reporter, sequence, operation, text
    kLeft,      // the sender takes no part in exchanges from `exchange` on: num_begun, text
    kQuestion,  // is the receiver waiting, and for which ranks?
    kWaiting    // the answer: exchange, sequence, operation, pending
  };
  static constexpr size_t kMaxPending = 16;

  Kind kind = Kind::kAbort;
  int32_t code = 0;
  int32_t culprit = -1;
  int32_t reporter = -1;
  uint64_t exchange = 0;
  uint64_t sequence = 0;
  uint64_t num_begun = 0;  // exchanges that the sender has started
  int32_t num_pending = 0;
  std::array<int32_t, kMaxPending> pending{};  // the lowest ranks that the sender is waiting for
  std::array<char, 24> operation{};            // null-terminated, like text
  std::array<char, 1024> text{};

  std::span<const int32_t> pending_ranks() const {
    return {pending.data(), static_cast<size_t>(num_pending)};
  }
};

ControlMessage abort_message(const Failure& failure);
Failure failure_from(const ControlMessage& abort_message);
ControlMessage left_message(std::string_view reason, uint64_t exchange, uint64_t num_begun);

/// Sends and receives the control messages of one communicator. Never waits.
class MpiControl {
 public:
  /// Uses `communicator`, which nobody else may use.
  explicit MpiControl(MPI_Comm communicator);
  ~MpiControl();
  MpiControl(const MpiControl&) = delete;
  MpiControl& operator=(const MpiControl&) = delete;

  void send(int peer, const ControlMessage& message);
  void send_to_all_others(const ControlMessage& message);
  /// Like send_to_all_others, for the last message; also while another thread is in a call.
  void say_goodbye(const ControlMessage& message) const;

  /// Passes every message that has arrived to `handle`, which may send.
  void poll(const std::function<void(int sender, const ControlMessage&)>& handle);

 private:
  struct Outgoing {
    MPI_Request request = MPI_REQUEST_NULL;
    std::shared_ptr<ControlMessage> message;
  };

  void post_receive();
  MPI_Request post_send(int peer, const ControlMessage& message) const;
  void forget_what_was_sent();

  MPI_Comm communicator_;
  std::vector<int> peers_;  // all other ranks
  MPI_Request receive_ = MPI_REQUEST_NULL;
  std::shared_ptr<ControlMessage> incoming_;
  std::vector<Outgoing> outgoing_;
};

}  // namespace crossdock::comm
