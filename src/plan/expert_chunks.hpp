#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/extend/plan_data.hpp"
#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// The number of chunks, at most `num_chunks`, into which the local experts of every rank are
/// divided: at least one, and no more than the largest number of local experts of any rank.
int64_t count_chunks(const PlanData& plan, int64_t num_chunks);

/// The first of a rank's local experts in chunk `chunk` of `count`; for chunk == count, its number
/// of experts. Chunks are about equal in size. Needs only the placement from the plan.
int64_t first_expert_of_chunk(const PlanData& plan, int rank, int64_t chunk, int64_t count);

/// Splits the local experts of every rank into count_chunks chunks. Not collective.
std::vector<ExpertChunk> split_experts(const PlanData& plan, int64_t num_chunks);

/// The number of routes of this rank to the experts of a chunk.
int64_t rows_sent(const PlanData& plan, const ExpertChunk& chunk);

}  // namespace crossdock
