#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/dtype.hpp"
#include "crossdock/error.hpp"
#include "crossdock/experts.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/extend/strategy_list.hpp"
#include "crossdock/group.hpp"
#include "crossdock/mpi.hpp"
#include "crossdock/plan.hpp"

namespace crossdock {

/// The links and the memory of one rank. Rates are the vendors' figures in bytes per second; link
/// rates are per direction.
struct Fabric {
  std::string_view name;
  double within_node_rate = 0;    // to all ranks on its node together
  double between_nodes_rate = 0;  // to all other ranks together
  double memory_rate = 0;         // read + written
  int64_t memory_bytes = 0;       // for buffers; 0: no known limit
  int64_t send_queue_depth = 65535;
};

inline constexpr int64_t kGigabyte = 1'000'000'000;

inline constexpr std::array kFabricPresets = {
    Fabric{"h100-nvlink-400g", 450e9, 50e9, 3.35e12, 80 * kGigabyte},
    Fabric{"a100-nvlink-200g", 300e9, 25e9, 2.039e12, 80 * kGigabyte},
    Fabric{"h200-nvlink-400g", 450e9, 50e9, 4.8e12, 141 * kGigabyte},
    Fabric{"b200-nvlink-400g", 900e9, 50e9, 8e12, 180 * kGigabyte},
    Fabric{"gb200", 900e9, 50e9, 8e12, 186 * kGigabyte},      // a node is an NVLink domain
    Fabric{"efa", 450e9, 50e9, 3.35e12, 80 * kGigabyte},      // 3200 Gbit/s for 8 ranks
    Fabric{"ethernet", 25e9, 3.125e9, 2e12, 48 * kGigabyte},  // PCIe and 25 Gbit/s per rank
};

/// Throws Error(kInvalidArgument), listing the valid names, if there is no such preset.
CROSSDOCK_API const Fabric& find_fabric(std::string_view name);

/// The sizes of one MoE layer of a published model.
struct ModelPreset {
  std::string_view name;
  int64_t width = 0;        // D
  int64_t inner = 0;        // F of one routed expert
  int64_t num_experts = 0;  // E
  int64_t top_k = 0;        // K
  Activation activation = Activation::kSwiglu;
  int64_t shared_inner = 0;  // F of the shared experts together; 0: none
};

inline constexpr std::array kModelPresets = {
    ModelPreset{"qwen3-30b-a3b", 2048, 768, 128, 8, Activation::kSwiglu, 0},
    ModelPreset{"deepseek-v3", 7168, 2048, 256, 8, Activation::kSwiglu, 2048},
    ModelPreset{"gpt-oss-20b", 2880, 2880, 32, 4, Activation::kClampedSwiglu, 0},
    ModelPreset{"mixtral-8x7b", 4096, 14336, 8, 2, Activation::kSwiglu, 0},
};

/// Throws Error(kInvalidArgument), listing the valid names, if there is no such preset.
CROSSDOCK_API const ModelPreset& find_model(std::string_view name);

/// Input of the cost model: one layer, its tokens and the machine.
struct CostInputs {
  DispatchConfig config = {};
  Topology topology = {};      // of the ranks that exchange rows
  int64_t tokens = 0;          // T of every rank
  DType dtype = DType::kBF16;  // of the tokens; results of fp8 tokens are bf16
  double zipf = 0;             // experts are drawn with weights (e + 1)^-zipf; 0: uniformly
  Fabric fabric = kFabricPresets[0];
  MpiOptions mpi{};  // chunk_bytes and max_in_flight
  int64_t staging_bytes = GroupOptions{}.staging_bytes;
};

/// Rows or bytes on the links of one rank.
struct LinkLoad {
  double within_node = 0;
  double between_nodes = 0;
};

/// Expected cost of one dispatch or one combine; with a capacity, only kept routes count.
struct OperationCost {
  LinkLoad rows;              // sent by a rank, mean
  LinkLoad bytes;             // sent by a rank, mean
  LinkLoad most_bytes;        // the most that any rank sends or receives
  double memory_traffic = 0;  // the most bytes that any rank reads and writes in its memory
  double requests = 0;        // a rank's sends and receives through the communicator, mean
  double rounds = 0;          // exchanges that make these requests
  double lower_bound_s = 0;   // links and memory at full rate, concurrently
  double serial_s = 0;        // links first, then memory, as the strategies do
};

/// Memory of one rank, in bytes.
struct MemoryNeed {
  double window_bytes = 0;  // memory that peers load from and store into
  double pool_bytes = 0;    // staging and results
  double plan_bytes = 0;    // counts, orders and addresses of rows
  double total() const { return window_bytes + pool_bytes + plan_bytes; }
};

/// Memory of one step: forward and backward of one layer, rows kept for backward, one plan at a
/// time.
struct StepMemory {
  MemoryNeed expected;                        // of the rank that expects the most rows
  MemoryNeed worst_case;                      // if all routes that can go to one rank go there
  std::optional<MemoryNeed> with_capacity{};  // worst case within capacity and max_rows
};

struct StrategyCost {
  std::string name;
  int64_t preference = 0;  // position in the list of candidates
  std::string same_as{};   // an equivalent strategy on this topology; empty: none
  OperationCost dispatch;
  OperationCost combine;       // exact
  OperationCost partial_sums;  // combine with config.partial_sums; kNone: as with kF32
  StepMemory memory;           // in the configured mode
  int64_t max_in_flight = 0;   // most requests pending at once; 0: moving rows needs none
  /// Forward and backward: two dispatches (the second of gradients, in the dtype of the results)
  /// and two combines in the configured mode.
  double step_lower_bound_s = 0;
  double step_serial_s = 0;
};

/// Expected destinations of routes.
struct RoutingEstimate {
  double ranks_per_token = 0;  // distinct ranks that a token is routed to
  double nodes_per_token = 0;  // distinct nodes
  double rows_per_rank = 0;    // R, mean
  double dropped_share = 0;    // share of routes that capacity drops
  double most_rows = 0;        // R of the rank that expects the most
  int64_t most_experts = 0;    // of the rank that has the most
};

struct CostEstimate {
  RoutingEstimate routing;
  /// Lower bound for any strategy: each token sends one row to every other rank it has a route to,
  /// of which only one per far node crosses between nodes.
  OperationCost least_dispatch;
  std::vector<StrategyCost> strategies;  // all candidates, sorted by name
};

/// Estimates the costs of all candidates. Throws Error(kInvalidArgument) if the configuration is
/// invalid or there are no candidates. Time and memory grow with P and E * K, not with T.
CROSSDOCK_API CostEstimate estimate_costs(const CostInputs& inputs,
                                          const StrategyList& candidates = built_in_strategies());

/// The largest number of tokens, at most inputs.tokens, for which the expected memory of at least
/// one candidate is within fabric.memory_bytes; 0 if there is none.
CROSSDOCK_API int64_t largest_fitting_tokens(
    const CostInputs& inputs, const StrategyList& candidates = built_in_strategies());

struct StrategyChoice {
  std::string name;
  std::string reason;
};

/// The strategy with the least serial time among those whose expected memory is within
/// fabric.memory_bytes, or among all if none is. If two are within 2 %, the earlier candidate wins.
/// Ranks with identical inputs get the same choice. Throws Error(kInvalidArgument) if `costs` is
/// empty.
CROSSDOCK_API StrategyChoice choose_strategy(const CostInputs& inputs,
                                             std::span<const StrategyCost> costs);

/// The candidate that "auto" stands for in a group with this topology, and why; other names are
/// returned unchanged. Assumes the links of the first fabric preset: only their ratio matters.
CROSSDOCK_API StrategyChoice
resolve_strategy(std::string_view name, const DispatchConfig& config, const Topology& topology,
                 const StrategyList& candidates = built_in_strategies());

/// A job to plan.
struct JobDescription {
  // The layer.
  int64_t width = 0;        // D
  int64_t inner = 0;        // F, for the size of the experts' weights; 0: not computed
  int64_t num_experts = 0;  // E
  int64_t top_k = 0;        // K
  DType dtype = DType::kBF16;

  // Tokens per rank: `tokens`, or sequence * micro_batch divided among tp * cp ranks.
  int64_t sequence = 0;
  int64_t micro_batch = 1;
  std::optional<int64_t> tokens{};

  // The mesh. Ranks are numbered node by node. tp and cp vary fastest in the mesh of tokens, ep in
  // the mesh of experts; pp varies slowest.
  int64_t nodes = 1;
  int64_t ranks_per_node = 1;
  int64_t tp = 1;
  int64_t cp = 1;
  int64_t pp = 1;
  std::optional<int64_t> ep{};  // default: all ranks of a pipeline stage

  // The exchange of rows.
  int64_t alignment = 1;
  std::optional<double> capacity{};  // factor
  PartialSums partial_sums = PartialSums::kNone;
  Copies copies = Copies::kAuto;  // kAuto: kPerRank if the link inside a node is slower than memory
  double zipf = 0;
  Fabric fabric = kFabricPresets[0];
  MpiOptions mpi{};
};

/// The send queue of a library that posts entries for all N tokens of a rank at once.
struct QueueNeed {
  int64_t entries_per_token = 0;
  int64_t entries = 0;                 // entries_per_token * N + 1
  int64_t largest_tokens = 0;          // largest N for which the queue has room
  int64_t largest_rounded_tokens = 0;  // rounded down to a multiple of 64
  bool fits = false;
};

/// Result of plan_job.
struct JobPlan {
  CostInputs inputs;                // for the expert group that spans the most nodes
  int64_t num_ranks = 0;            // total
  int64_t group_ranks = 0;          // ranks that exchange rows: ep
  int64_t group_nodes = 0;          // nodes of these ranks
  int64_t capacity_rows = 0;        // C, limit per source rank and expert; 0: no capacity
  int64_t expert_weight_bytes = 0;  // of the rank with the most, one layer; 3 matrices per expert
  CostEstimate costs;
  QueueNeed dispatch_queue;  // three entries per token
  QueueNeed combine_queue;   // two
  StrategyChoice choice;
};

/// Plans a job. Throws Error for an impossible one: kInvalidArgument if a rule is broken, kCapacity
/// if the expected memory of every candidate exceeds the fabric's. The message names the limit, the
/// value and the largest legal value.
CROSSDOCK_API JobPlan plan_job(const JobDescription& job,
                               const StrategyList& candidates = built_in_strategies());

}  // namespace crossdock
