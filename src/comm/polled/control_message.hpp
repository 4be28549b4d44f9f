#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "comm/failure.hpp"
#include "comm/waiting.hpp"

namespace crossdock::comm {

/// A message between ranks, in addition to the data. Sent as laid out in memory, so all ranks must
/// run the same build; small enough for MPI to send it eagerly.
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

/// Whether a message from the network can be used as it is: a known kind and error code, ranks
/// within [-1, size), null-terminated texts.
bool is_valid(const ControlMessage& message, int size);

/// Sends and receives the control messages of one communicator. Never waits.
class ControlLinks {
 public:
  virtual ~ControlLinks() = default;

  virtual void send(int peer, const ControlMessage& message) = 0;
  virtual void send_to_all_others(const ControlMessage& message) = 0;
  /// Like send_to_all_others, for the last message; may be called while another thread is in a
  /// call.
  virtual void say_goodbye(const ControlMessage& message) const = 0;

  /// Passes every message that has arrived to `handle`, which may send.
  virtual void poll(const std::function<void(int sender, const ControlMessage&)>& handle) = 0;
};

/// Finds the rank that the others are waiting for. Asks the pending peers whether they are waiting
/// too. A rank that answers is in an exchange and names the ranks it is waiting for, which are
/// asked next; a rank that does not answer is not in an exchange.
class Inquiry {
 public:
  struct Self {
    int rank = 0;
    uint64_t exchange = 0;
    std::vector<int> pending;
  };
  Inquiry(Self self, ControlLinks& control);

  void note_answer(int peer, const ControlMessage& answer);
  /// Whether the time for answers is over.
  bool is_over() const;
  /// Whether all ranks that were asked at the beginning have answered.
  bool has_all_answers() const;
  /// The answer of the rank that waits for `peer` in the earliest call, if that is earlier than
  /// this rank's own.
  std::optional<ControlMessage> first_to_miss(int peer) const;

  /// The culprit is the lowest silent rank among those that the rank furthest behind is waiting
  /// for; if there is none, any silent rank; if all ranks wait for each other, the rank furthest
  /// behind. The call is the one in which the culprit was first missed.
  struct Verdict {
    int culprit = -1;
    std::optional<ControlMessage> first_missed_by;  // that rank's answer; empty: this rank
  };
  Verdict verdict() const;

 private:
  void ask(int peer);
  bool is_silent(int peer) const { return asked_.contains(peer) && !answers_.contains(peer); }

  const Self self_;
  ControlLinks& control_;
  const Clock::time_point begin_;
  std::set<int> asked_;
  std::map<int, ControlMessage> answers_;
};

}  // namespace crossdock::comm
