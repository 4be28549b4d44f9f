#pragma once

#include "cost/step_sizes.hpp"

namespace crossdock {

/// The memory of a rank after some steps, forward and backward, with these sizes: the library's
/// requests, in their order, met as BufferPool and WindowPool meet them.
MemoryNeed memory_of_step(const StepSizes& sizes, const CostInputs& inputs, StrategyKind kind);

}  // namespace crossdock
