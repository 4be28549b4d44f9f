#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "crossdock/extend/communicator.hpp"
#include "crossdock/extend/strategy_model.hpp"
#include "crossdock/planner.hpp"
#include "plan/placement.hpp"

namespace crossdock {

/// The sums for this many tokens on every rank, each with this spread.
RouteSums expected_sums(const TokenSpread& spread, const Topology& topology, int64_t tokens);

/// [P] Number of ranks on other nodes that reach this rank's node through it, with one gateway per
/// node (gateway_per_node in plan/placement.hpp).
std::vector<double> sources_of_gateways(const Topology& topology);

/// One rank's routes: [T, K] experts, -1 for none.
struct CountedRoutes {
  std::span<const int32_t> expert_ids;
  int64_t top_k = 0;
};

/// Counts the given routes of every rank.
RouteSums counted_sums(std::span<const CountedRoutes> ranks, std::span<const int32_t> owner,
                       const Topology& topology);

RowBytes row_bytes_of(const CostInputs& inputs);

/// One rank's expected sizes, with half an alignment of pad rows per local expert; a whole one for
/// an expert without rows if keep_empty_segments is set.
StepSizes expected_sizes(const RouteSums& sums, const CostInputs& inputs,
                         const Placement& placement, size_t rank);

/// The sizes if every token of every rank has as many routes to this rank as it can.
StepSizes worst_sizes(const CostInputs& inputs, const Placement& placement, size_t rank);

/// The same under the configured capacity or max_rows. REQUIRES one of them.
StepSizes limited_sizes(const CostInputs& inputs, const Placement& placement, size_t rank);

/// A rank's memory after several forward and backward steps with these sizes: all requests of the
/// library and of the strategy, in order, served as BufferPool and WindowPool serve them.
MemoryNeed memory_of_step(const StrategyModel& model, const StepSizes& sizes,
                          const StrategyJob& job);

}  // namespace crossdock
