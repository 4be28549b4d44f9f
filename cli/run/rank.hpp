#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/device/rank_device.hpp"
#include "cli/run/job.hpp"
#include "cli/run/trace.hpp"
#include "cli/run/values.hpp"
#include "crossdock/crossdock.hpp"

namespace crossdock::cli {

/// Capacity of the event recorder; must hold all events of one step.
constexpr int64_t kRecordedEvents = 16384;

/// Tokens, parameters and gradients of one rank.
struct RunTensors {
  OwnedTensor x;         // [T, D]
  OwnedTensor grad_out;  // [T, D]
  MoeLayerWeights weights;
  MoeLayerGradients grads;

  /// In host memory.
  RunTensors(const RunJob& job, const RunValues& values, Group& group);
  /// Copies of `host` on a device; gradients are not filled. Must not outlive the device.
  RunTensors(const RunTensors& host, RankDevice& device);

  /// Copies the gradients of `other`, on `device`, into these.
  void read_gradients(const RunTensors& other, RankDevice& device) const;

 private:
  std::vector<Buffer> buffers_;      // memory of tensors on the host
  std::vector<OwnedTensor> copies_;  // memory of tensors on a device
};

/// Results of one rank, from the last step.
struct RunOutcome {
  OwnedTensor out;     // [T, D]
  OwnedTensor grad_x;  // [T, D], with backward
  MoeDecision decision;
};

/// Result of comparing a sample with the fp64 reference.
struct RunCheck {
  bool passed = true;
  int64_t num_tokens = 0;    // whose outputs and gradients were compared
  int64_t num_experts = 0;   // for which rows of weight gradients were compared
  double largest_error = 0;  // as a fraction of the tolerance
  std::string failure;       // the first one, with its rank
};

/// Time and bytes of one operation.
struct OperationTime {
  std::string name;
  double median_us = 0;  // over the steps, slowest rank
  int64_t bytes = 0;     // moved in one step by all ranks together
};

/// Medians over the steps of one rank.
struct RankTime {
  double forward_us = 0;
  double backward_us = 0;
};

/// Results of the whole run; identical on every rank.
struct RunResult {
  std::string strategy;   // the one used, if "auto" chose it
  double forward_us = 0;  // medians over the steps, slowest rank
  double backward_us = 0;
  std::vector<double> steps_us;           // forward and backward of each step, slowest rank
  std::vector<RankTime> rank_times;       // [P]
  std::vector<OperationTime> operations;  // in execution order
  std::vector<int64_t> rows_per_rank;     // [P]
  std::vector<int64_t> rows_per_expert;   // [E]
  /// [P, P] rows that a rank (outer) sends to the experts of another in a dispatch
  std::vector<std::vector<int64_t>> rows_from_to;
  std::vector<int> gpu_of_rank;  // [P] index on the rank's node; empty on the CPU
  int num_nodes = 1;
  std::string note;           // see Communicator::note; of rank 0
  GroupMemory memory;         // after the steps, of the rank with the most
  int64_t planned_bytes = 0;  // predicted, if all experts are equally likely
  Traffic traffic;            // summed over ranks and steps; requests in flight: maximum over ranks
  uint64_t checksum = 0;      // of out
  uint64_t grad_checksum = 0;  // of grad_x; 0 without backward
  std::optional<RunCheck> check;
  std::optional<TraceSummary> trace;  // with --trace
};

/// Called by rank 0 with a description of what it does next.
using StepProgress = std::function<void(const std::string&)>;

/// Runs the job as one of its ranks. Collective.
RunResult run_rank(Group& group, const RunJob& job, const StepProgress& progress);

}  // namespace crossdock::cli
