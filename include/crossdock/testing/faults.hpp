#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/error.hpp"
#include "crossdock/group.hpp"

/// Fault injection into one rank, the culprit: checks that every other rank gets an error that
/// names it, that no rank hangs, and that the survivors can continue without it.
namespace crossdock::conformance {

enum class FaultKind : uint8_t {
  kThrows,       // throws an exception that is not an Error
  kLeaves,       // returns early: destroys its group, or leaves it in the middle of a call
  kStalls,       // sleeps past the deadlines, then continues
  kSkips,        // omits the step: a call, or the exchange inside a call
  kOtherConfig,  // makes the call with a different configuration
  kKilled        // its process dies (SIGKILL); only if ranks are processes
};
inline constexpr std::array<std::string_view, 6> kFaultNames = {"throws", "leaves",       "stalls",
                                                                "skips",  "other_config", "killed"};

enum class FaultStep : uint8_t {
  kBeforeCounts,        // before plan
  kAfterCounts,         // inside plan, after the ranks have agreed on the counts
  kBeforeDispatch,      // between plan and dispatch
  kMidDispatch,         // inside dispatch, after the ranks have agreed
  kBetweenChunks,       // inside a dispatch in two chunks, after the first has arrived
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

/// Every kind at every step where it can happen; kOtherConfig, for example, only between calls.
CROSSDOCK_API std::vector<FaultCase> list_faults(const std::vector<std::string>& strategies,
                                                 int culprit);

/// How a case ended on one rank.
struct FaultOutcome {
  std::vector<std::string> findings;   // problems; empty if the case passed
  std::string message;                 // of this rank's error
  std::chrono::nanoseconds latency{};  // from the point of the fault to this rank's error
};

/// Runs a case on a new group of all ranks of `base`, with `deadline` for both deadlines. Every
/// survivor must get an error whose context names the culprit and the call. The survivors then form
/// a group (after an agreed error, all ranks keep theirs), which must give correct results although
/// the culprit may still be running. `base` stays usable unless the culprit was killed. Collective
/// over `base`.
CROSSDOCK_API FaultOutcome run_fault(Group& base, const FaultCase& fault,
                                     std::chrono::nanoseconds deadline);

}  // namespace crossdock::conformance
