#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// The local experts of every rank in `num_chunks` parts of about equal size, or as many as the
/// rank with most experts has; at least one. Exchanges nothing.
std::vector<ExpertChunk> cut_experts(const PlanData& plan, int64_t num_chunks);

/// Routes of this rank to the experts of a chunk.
int64_t rows_sent(const PlanData& plan, const ExpertChunk& chunk);

}  // namespace crossdock
