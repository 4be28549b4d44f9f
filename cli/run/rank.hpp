#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/run/job.hpp"
#include "cli/run/trace.hpp"
#include "cli/run/values.hpp"
#include "crossdock/crossdock.hpp"

namespace crossdock::cli {

/// Events that the recorder of a run's group must hold: all of one step, at least.
constexpr int64_t kRecordedEvents = 16384;

/// What one rank of a run holds: its tokens, its parameters and their gradients.
struct RunTensors {
  OwnedTensor x;         // [T, D]
  OwnedTensor grad_out;  // [T, D]
  MoeLayerWeights weights;
  MoeLayerGradients grads;

  RunTensors(const RunJob& job, const RunValues& values, Group& group);

 private:
  std::vector<Buffer> buffers_;  // of all of them
};

/// What one rank of a run has computed, in its last step.
struct RunOutcome {
  OwnedTensor out;     // [T, D]
  OwnedTensor grad_x;  // [T, D], with backward
  MoeDecision decision;
};

/// How the sample that was compared with the fp64 reference came out.
struct RunCheck {
  bool passed = true;
  int64_t num_tokens = 0;    // whose outputs and gradients were compared
  int64_t num_experts = 0;   // of whose weight gradients some rows were compared
  double largest_error = 0;  // as a part of what is allowed
  std::string failure;       // the first one, with its rank
};

/// Time and bytes of one operation.
struct OperationTime {
  std::string name;
  double median_us = 0;  // over the steps; of the slowest rank
  int64_t bytes = 0;     // moved in one step by all ranks together
};

/// The whole run; the same on all ranks.
struct RunResult {
  std::string strategy;   // the one that was used
  double forward_us = 0;  // medians over the steps, of the slowest rank
  double backward_us = 0;
  std::vector<double> steps_us;           // forward and backward of each step, slowest rank
  std::vector<OperationTime> operations;  // in their order
  std::vector<int64_t> rows_per_rank;     // [P]
  std::vector<int64_t> rows_per_expert;   // [E]
  int num_nodes = 1;
  GroupMemory memory;         // of the rank that holds most, after the steps
  int64_t planned_bytes = 0;  // what a rank was expected to hold, all experts alike
  Traffic traffic;        // summed over ranks and steps; requests in flight: the most of any rank
  uint64_t checksum = 0;  // of out
  uint64_t grad_checksum = 0;  // of grad_x; 0 without backward
  std::optional<RunCheck> check;
  std::optional<TraceSummary> trace;  // with --trace
};

/// Called by rank 0 with what is done next.
using StepProgress = std::function<void(const std::string&)>;

/// Runs the job as one of its ranks. Collective.
RunResult run_rank(Group& group, const RunJob& job, const StepProgress& progress);

}  // namespace crossdock::cli
