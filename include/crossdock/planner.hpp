#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/fabric.hpp"
#include "crossdock/mpi.hpp"
#include "crossdock/strategy_cost.hpp"

namespace crossdock {

/// A job, before it starts.
struct JobDescription {
  // The layer.
  int64_t width = 0;        // D
  int64_t inner = 0;        // F, for the size of the experts' weights; 0: not wanted
  int64_t num_experts = 0;  // E
  int64_t top_k = 0;        // K
  DType dtype = DType::kBF16;

  // The tokens of a rank: sequence times micro_batch, shared by tp * cp ranks; or given.
  int64_t sequence = 0;
  int64_t micro_batch = 1;
  std::optional<int64_t> tokens{};

  // The mesh. Ranks are numbered node by node; tp and cp are fastest among the ranks that hold
  // tokens, ep among those that hold experts, pp slowest.
  int64_t nodes = 1;
  int64_t ranks_per_node = 1;
  int64_t tp = 1;
  int64_t cp = 1;
  int64_t pp = 1;
  std::optional<int64_t> ep{};  // not given: all ranks of a pipeline stage

  // How rows travel.
  int64_t alignment = 1;
  std::optional<double> capacity{};  // factor
  bool partial_sums = false;
  double zipf = 0;
  Fabric fabric = kFabricPresets[0];
  MpiOptions engine{};
};

/// What a scheme needs whose send queue has entries for all N tokens of a rank.
struct QueueNeed {
  int64_t entries_per_token = 0;
  int64_t entries = 0;                 // entries_per_token * N + 1
  int64_t largest_tokens = 0;          // that the queue has room for
  int64_t largest_rounded_tokens = 0;  // the same, in steps of 64
  bool fits = false;
};

/// What a job needs.
struct JobPlan {
  CostInputs inputs;                // with the ranks of one expert group: the one on most nodes
  int64_t num_ranks = 0;            // in all
  int64_t group_ranks = 0;          // that exchange rows: ep
  int64_t group_nodes = 0;          // on which they are
  int64_t capacity_rows = 0;        // C, at most from a rank to an expert; 0: no capacity
  int64_t expert_weight_bytes = 0;  // the most of a rank, one layer: three matrices an expert
  CostEstimate costs;
  QueueNeed dispatch_queue;  // three entries per token
  QueueNeed combine_queue;   // two
  StrategyChoice choice;
};

/// Throws Error for a job that cannot be: kInvalidArgument where a rule is broken, kCapacity where
/// no strategy's expected memory fits the fabric's. The message names the limit, the value and the
/// largest legal one.
JobPlan plan_job(const JobDescription& job);

}  // namespace crossdock
