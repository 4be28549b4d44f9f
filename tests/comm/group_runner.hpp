#pragma once

#include <functional>
#include <string>
#include <vector>

#include "crossdock/group.hpp"

namespace crossdock::testing {

/// How a rank ended.
struct Outcome {
  bool threw = false;
  ErrorCode code = ErrorCode::kInternal;
  int culprit = -1;
  uint64_t sequence = 0;
  std::string operation = "";
  std::string message = "";
};

/// How the calling rank's body ended.
Outcome outcome_of(const std::function<void()>& body);

// Communicator tests are compiled for each communicator; group_runner_<name>.cpp defines these.

/// Group sizes that this communicator is tested with.
std::vector<int> group_sizes();

/// Runs body on each rank of a new group and returns how every rank ended, even if the ranks are
/// processes.
std::vector<Outcome> run_group(int size, const std::function<void(Group&)>& body,
                               GroupOptions options = {});

/// Delays the calling rank of run_group until the others have ended or, if that cannot be detected,
/// for longer than they take to give up after kShort.
void stall();

/// A deadline that no healthy test reaches, and one that tests wait for.
inline constexpr std::chrono::seconds kAmple{60};
inline constexpr std::chrono::milliseconds kShort{1000};

inline GroupOptions ample_deadlines() {
  return {.arrival_deadline = kAmple, .progress_deadline = kAmple, .recorded_events = 64};
}

/// Runs body on a group with ample deadlines and expects every rank to return.
void run_healthy_group(int size, const std::function<void(Group&)>& body);

}  // namespace crossdock::testing
