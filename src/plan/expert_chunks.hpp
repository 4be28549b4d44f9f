#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Splits the local experts of every rank into `num_chunks` chunks of about equal size; at least
/// one, and at most as many as any rank has experts. Not collective.
std::vector<ExpertChunk> split_experts(const PlanData& plan, int64_t num_chunks);

/// The number of routes of this rank to the experts of a chunk.
int64_t rows_sent(const PlanData& plan, const ExpertChunk& chunk);

}  // namespace crossdock
