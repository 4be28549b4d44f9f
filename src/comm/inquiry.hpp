#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "comm/control_message.hpp"
#include "comm/deadlines.hpp"

namespace crossdock::comm {

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
  Inquiry(Self self, ControlChannel& control);

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
  ControlChannel& control_;
  const Clock::time_point begin_;
  std::set<int> asked_;
  std::map<int, ControlMessage> answers_;
};

}  // namespace crossdock::comm
