#pragma once

#include <cstddef>

#include "crossdock/extend/strategy_model.hpp"
#include "crossdock/planner.hpp"
#include "plan/placement.hpp"

namespace crossdock {

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
