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

/// What the calling rank's body threw, or that it returned.
Outcome outcome_of(const std::function<void()>& body);

// The tests of the engines are compiled once per engine; each program defines these.

/// Group sizes that this engine is tested with.
std::vector<int> group_sizes();

/// Runs body on each rank of a new group and returns how every rank ended, also where the ranks
/// are processes.
std::vector<Outcome> run_group(int size, const std::function<void(Group&)>& body,
                               GroupOptions options = {});

/// Holds the calling rank of run_group up: until the others have ended where that can be seen, else
/// for longer than it takes them to give up after kShort.
void stall();

/// A deadline that no healthy test needs, and one that a test waits for.
inline constexpr std::chrono::seconds kAmple{60};
inline constexpr std::chrono::milliseconds kShort{1000};

inline GroupOptions ample_deadlines() {
  return {.arrival_deadline = kAmple, .progress_deadline = kAmple, .recorded_events = 64};
}

/// Runs body on a group with ample deadlines and expects every rank to return.
void run_healthy_group(int size, const std::function<void(Group&)>& body);

}  // namespace crossdock::testing
