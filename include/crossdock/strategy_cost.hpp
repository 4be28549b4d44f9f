#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "crossdock/dispatch_config.hpp"
#include "crossdock/dtype.hpp"
#include "crossdock/extend/communicator.hpp"
#include "crossdock/fabric.hpp"
#include "crossdock/group.hpp"
#include "crossdock/mpi.hpp"

namespace crossdock {

/// What is known before a job starts.
struct CostInputs {
  DispatchConfig config = {};
  Topology topology = {};      // of the ranks that exchange rows
  int64_t tokens = 0;          // T of every rank
  DType dtype = DType::kBF16;  // of the tokens; results of fp8 tokens are bf16
  double zipf = 0;             // experts are drawn with weights (e + 1)^-zipf; 0: all alike
  Fabric fabric = kFabricPresets[0];
  MpiOptions engine{};  // chunk_bytes and max_in_flight
  int64_t staging_bytes = GroupOptions{}.staging_bytes;
};

/// On the links of one rank.
struct LinkLoad {
  double within_node = 0;
  double between_nodes = 0;
};

/// One dispatch or one combine, as expected; with a capacity, of the routes that it keeps.
struct OperationCost {
  LinkLoad rows;              // sent by a rank, mean
  LinkLoad bytes;             // the same
  LinkLoad most_bytes;        // the most that any rank sends or receives
  double memory_traffic = 0;  // the most bytes any rank reads and writes in its memory
  double requests = 0;        // a rank's sends and receives through the engine, mean
  double rounds = 0;          // exchanges that they are in
  double lower_bound_s = 0;   // the slowest of links and memory at full rate, all at once
  double serial_s = 0;        // links and memory one after the other, as the strategies run them
};

/// Memory of one rank, in bytes.
struct MemoryNeed {
  double window_bytes = 0;  // that peers load from and store to
  double pool_bytes = 0;    // staging and results
  double plan_bytes = 0;    // counts, orders and addresses of rows
  double total() const { return window_bytes + pool_bytes + plan_bytes; }
};

/// For one step: forward and backward of one layer, rows kept for backward, one plan in flight.
struct StepMemory {
  MemoryNeed expected;                        // of the rank that expects most rows
  MemoryNeed worst_case;                      // all routes that can go to one rank go there
  std::optional<MemoryNeed> with_capacity{};  // no expert gets more than its capacity allows
};

struct StrategyCost {
  std::string name;
  OperationCost dispatch;
  OperationCost combine;       // exact
  OperationCost partial_sums;  // combine with config.partial_sums
  StepMemory memory;           // in the configured mode
  int64_t max_in_flight = 0;   // requests outstanding at most; 0: rows need none
  /// Forward and backward, that is two dispatches (the second of gradients, in the dtype of the
  /// results) and two combines in the configured mode.
  double step_lower_bound_s = 0;
  double step_serial_s = 0;
};

/// Where the routes of a token go, as expected.
struct RoutingEstimate {
  double ranks_per_token = 0;  // distinct ranks that a token has routes to
  double nodes_per_token = 0;  // distinct nodes
  double rows_per_rank = 0;    // R, mean
  double dropped_share = 0;    // of the routes, by capacity
  double most_rows = 0;        // R of the rank that expects most
  int64_t most_experts = 0;    // of a rank
};

struct CostEstimate {
  RoutingEstimate routing;
  /// The least that any way of dispatching must move: one row for every other rank that a token has
  /// a route to, all but one per node of them inside nodes.
  OperationCost least_dispatch;
  std::vector<StrategyCost> strategies;  // in the order of strategy_names()
};

/// Throws Error(kInvalidArgument) for a wrong configuration. Time and memory grow with P and E * K,
/// not with T.
CostEstimate estimate_costs(const CostInputs& inputs);

/// The largest number of tokens, up to inputs.tokens, with which the expected memory of some
/// strategy fits into fabric.memory_bytes; 0 if there is none.
int64_t largest_fitting_tokens(const CostInputs& inputs);

struct StrategyChoice {
  std::string name;
  std::string reason;
};

/// The strategy with the least serial time, among those whose expected memory fits the fabric's if
/// any does. Where two are within 2 %, the one that comes first in: direct, hierarchical, alltoall,
/// allgather. The same on all ranks that give the same inputs.
StrategyChoice choose_strategy(const CostInputs& inputs, std::span<const StrategyCost> costs);

/// The name that "auto" stands for in a group with this topology; other names as they are. Links
/// are taken to be those of the first fabric preset: their ratio decides.
std::string resolve_strategy(std::string_view name, const DispatchConfig& config,
                             const Topology& topology);

}  // namespace crossdock
