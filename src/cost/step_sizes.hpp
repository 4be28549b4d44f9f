#pragma once

#include <cstdint>

#include "cost/route_sums.hpp"
#include "cost/strategy_flow.hpp"
#include "crossdock/planner.hpp"
#include "plan/placement.hpp"

namespace crossdock {

/// Bytes of one row.
struct RowBytes {
  double tokens = 0;   // on the way out
  double scales = 0;   // beside them, with fp8
  double results = 0;  // on the way back
  double partial = 0;  // of a partial sum
};
RowBytes row_bytes_of(const CostInputs& inputs);

/// Rows that a rank sends or receives between nodes for one token of every rank, whichever is more.
struct RelayLoad {
  double routes = 0;
  double travelling = 0;  // in the operation at hand: copies, or routes
  bool are_sums = false;
};

/// Between nodes, direct and hierarchical move rows in rounds, each for some tokens of every rank
/// (relay_rounds in relay.hpp): how many tokens, for rows of so many bytes.
double tokens_per_round(const CostInputs& inputs, const RelayLoad& load, double row_bytes);

/// What one rank has in one step, in rows.
struct StepSizes {
  double tokens = 0;         // T
  double all_tokens = 0;     // of all ranks
  double sent = 0;           // S
  double received = 0;       // R without pads
  double padded = 0;         // R
  double kept = 0;           // routes of its own tokens to its own experts
  double far_sent = 0;       // of sent: to other nodes
  double far_received = 0;   // of received: from other nodes
  double sums_sent = 0;      // ranks that its tokens have routes to: partial sums that come back
  double sums_received = 0;  // tokens of each source that have routes to it: sums it makes
  double near_sums = 0;      // direct, hierarchical: sums of rows of its own node
  double copies_sent = 0;    // direct, hierarchical: one per token and far rank or node
  double copies_received = 0;
  double targets_received = 0;  // routes behind the copies received
};

/// A rank's sizes by what all ranks send. Pads are half an alignment per local expert.
StepSizes expected_sizes(const RouteSums& sums, const CostInputs& inputs,
                         const Placement& placement, StrategyKind kind, size_t rank);

/// The sizes if every token of every rank has as many routes to this rank as it can.
StepSizes worst_sizes(const CostInputs& inputs, const Placement& placement, StrategyKind kind,
                      size_t rank);

/// The same under the configured capacity or max_rows. REQUIRES one of them.
StepSizes limited_sizes(const CostInputs& inputs, const Placement& placement, StrategyKind kind,
                        size_t rank);

}  // namespace crossdock
