#include "plan/expert_chunks.hpp"

#include <algorithm>

#include "crossdock/extend/plan_data.hpp"

namespace crossdock {
namespace {

int64_t num_experts(const PlanData& plan, size_t rank) {
  return plan.owner_offsets[rank + 1] - plan.owner_offsets[rank];
}

// The first row of a rank's local expert; for one past the last expert, the number of rows.
int64_t first_row(const PlanData& plan, size_t rank, int64_t local_expert) {
  if (local_expert == num_experts(plan, rank)) return plan.rows_per_rank[rank];
  const int64_t place = plan.owner_offsets[rank] + local_expert;
  const int32_t expert = plan.experts_by_owner[static_cast<size_t>(place)];
  return plan.segment_starts[static_cast<size_t>(expert)];
}

}  // namespace

int64_t count_chunks(const PlanData& plan, int64_t num_chunks) {
  int64_t most = 1;
  for (size_t rank = 0; rank < static_cast<size_t>(plan.P); ++rank) {
    most = std::max(most, num_experts(plan, rank));
  }
  return std::min(num_chunks, most);
}

int64_t first_expert_of_chunk(const PlanData& plan, int rank, int64_t chunk, int64_t count) {
  return num_experts(plan, static_cast<size_t>(rank)) * chunk / count;
}

std::vector<ExpertChunk> split_experts(const PlanData& plan, int64_t num_chunks) {
  const int64_t count = count_chunks(plan, num_chunks);
  std::vector<ExpertChunk> chunks(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    ExpertChunk& chunk = chunks[static_cast<size_t>(i)];
    for (int rank = 0; rank < plan.P; ++rank) {
      const int64_t first = first_expert_of_chunk(plan, rank, i, count);
      const int64_t last = first_expert_of_chunk(plan, rank, i + 1, count);
      const auto r = static_cast<size_t>(rank);
      chunk.first_expert.push_back(first);
      chunk.last_expert.push_back(last);
      chunk.first_row.push_back(first_row(plan, r, first));
      chunk.last_row.push_back(first_row(plan, r, last));
    }
  }
  return chunks;
}

int64_t rows_sent(const PlanData& plan, const ExpertChunk& chunk) {
  int64_t rows = 0;
  for (size_t rank = 0; rank < static_cast<size_t>(plan.P); ++rank) {
    for (int64_t i = chunk.first_expert[rank]; i < chunk.last_expert[rank]; ++i) {
      const int32_t expert =
          plan.experts_by_owner[static_cast<size_t>(plan.owner_offsets[rank] + i)];
      rows += plan.counts[static_cast<size_t>(plan.rank * plan.E + expert)];
    }
  }
  return rows;
}

}  // namespace crossdock
