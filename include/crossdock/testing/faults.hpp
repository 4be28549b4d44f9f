#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"

/// Faults put into one rank on purpose, to see that every other rank ends in an error that names
/// it, that nobody hangs, and that the survivors go on without it.
namespace crossdock::conformance {

enum class FaultKind : uint8_t {
  kThrows,       // an exception of the caller's own
  kLeaves,       // it returns early: its group is destroyed, or left in the middle of a call
  kStalls,       // it sleeps past the deadlines and then goes on, late
  kSkips,        // it leaves the step out: a call, or what a call exchanges
  kOtherConfig,  // it makes the step with another configuration
  kKilled        // its process ends at once (SIGKILL); ranks that are processes only
};
inline constexpr std::array<std::string_view, 6> kFaultNames = {"throws", "leaves",       "stalls",
                                                                "skips",  "other_config", "killed"};

enum class FaultStep : uint8_t {
  kBeforeCounts,        // before plan
  kAfterCounts,         // inside plan, when the counts are agreed
  kBeforeDispatch,      // between plan and dispatch
  kMidDispatch,         // inside dispatch, when all have agreed to it
  kBetweenChunks,       // inside a dispatch in two chunks, when the first has arrived
  kBeforeCombine,       // between dispatch and combine
  kMidCombine,          // inside combine
  kMidCombineBackward,  // inside combine_backward
  kMidDispatchBackward  // inside dispatch_backward
};
inline constexpr std::array<std::string_view, 9> kFaultStepNames = {
    "before_counts", "after_counts",         "before_dispatch",
    "mid_dispatch",  "between_chunks",       "before_combine",
    "mid_combine",   "mid_combine_backward", "mid_dispatch_backward"};

struct CROSSDOCK_API FaultCase {
  std::string strategy;
  FaultKind kind = FaultKind::kThrows;
  FaultStep step = FaultStep::kBeforeCounts;
  int culprit = 0;

  std::string name() const;  // "direct/stalls/mid_dispatch"
};

/// Every kind at every step where it can happen: a rank has another configuration for whole calls
/// only.
CROSSDOCK_API std::vector<FaultCase> list_faults(const std::vector<std::string>& strategies,
                                                 int culprit);

/// How a case ended on one rank.
struct FaultOutcome {
  std::vector<std::string> findings;   // what is wrong; empty: as it must be
  std::string message;                 // of the error this rank got
  std::chrono::nanoseconds latency{};  // from the point of the fault to this rank's error
};

/// Runs a case on a group of its own, made of all ranks of `base`, with deadlines of `deadline`. A
/// survivor must get an error with the culprit in its context and the call in its operation; it
/// then makes a group of the survivors, whose results must be right although the culprit may still
/// be at work. `base` stays usable, unless the culprit was killed. Collective over `base`.
CROSSDOCK_API FaultOutcome run_fault(Group& base, const FaultCase& fault,
                                     std::chrono::nanoseconds deadline);

}  // namespace crossdock::conformance
