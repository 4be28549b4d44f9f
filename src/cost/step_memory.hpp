#pragma once

#include "crossdock/extend/strategy_model.hpp"
#include "crossdock/planner.hpp"

namespace crossdock {

/// A rank's memory after several forward and backward steps with these sizes: all requests of the
/// library and of the strategy, in order, served as BufferPool and WindowPool serve them.
MemoryNeed memory_of_step(const StrategyModel& model, const StepSizes& sizes,
                          const StrategyJob& job);

}  // namespace crossdock
