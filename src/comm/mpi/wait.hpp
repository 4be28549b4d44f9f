#pragma once

#include <map>
#include <optional>
#include <set>

#include "comm/deadlines.hpp"
#include "comm/failure.hpp"
#include "comm/mpi/control.hpp"
#include "comm/mpi/transfers.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock::comm {

/// When an exchange has waited too long. A peer must arrive within `arrival` of the beginning; when
/// all that are waited for have arrived, `progress` may pass without a message.
class MpiWaitClock {
 public:
  explicit MpiWaitClock(const WaitContext& wait)
      : wait_(wait), begin_(Clock::now()), last_progress_(begin_) {}

  void note_progress() { last_progress_ = Clock::now(); }
  std::chrono::nanoseconds idle() const { return Clock::now() - last_progress_; }

  /// How long was waited in vain, if it was too long.
  std::optional<std::chrono::nanoseconds> expired(const MpiTransfers& transfers) const;

 private:
  const WaitContext& wait_;
  Clock::time_point begin_;
  Clock::time_point last_progress_;
};

/// Finds out who keeps the others waiting. A rank that is waiting itself answers, names those it
/// waits for, and is not to blame; they are asked next. Who does not answer is not in an exchange.
class MpiInquiry {
 public:
  struct Self {
    int rank = 0;
    uint64_t exchange = 0;
    std::vector<int> pending;
  };
  MpiInquiry(Self self, MpiControl& control);

  void note_answer(int peer, const ControlMessage& answer);
  /// Answers had their time.
  bool is_over() const;

  /// The culprit: of those that the rank furthest behind waits for, the lowest that did not answer;
  /// else any that did not; else, when all wait for each other, the one furthest behind. The call
  /// is where it was first missed.
  struct Verdict {
    int culprit = -1;
    std::optional<ControlMessage> first_missed_by;  // that rank's answer; nothing: by this rank
  };
  Verdict verdict() const;

 private:
  void ask(int peer);
  bool is_silent(int peer) const { return asked_.contains(peer) && !answers_.contains(peer); }

  const Self self_;
  MpiControl& control_;
  const Clock::time_point begin_;
  std::set<int> asked_;
  std::map<int, ControlMessage> answers_;
};

}  // namespace crossdock::comm
