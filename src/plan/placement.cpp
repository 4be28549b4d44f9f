#include "plan/placement.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "crossdock/extend/plan_data.hpp"

namespace crossdock {

int64_t first_expert(int64_t num_experts, int num_ranks, int rank) {
  return rank * (num_experts / num_ranks) + std::min<int64_t>(rank, num_experts % num_ranks);
}

Placement make_placement(const DispatchConfig& config, int num_ranks) {
  Placement placement;
  placement.owner = config.placement;
  if (placement.owner.empty()) {
    placement.owner.resize(static_cast<size_t>(config.num_experts));
    for (int rank = 0; rank < num_ranks; ++rank) {
      const int64_t first = first_expert(config.num_experts, num_ranks, rank);
      const int64_t last = first_expert(config.num_experts, num_ranks, rank + 1);
      std::fill(placement.owner.begin() + first, placement.owner.begin() + last, rank);
    }
  }
  // Counting sort of the experts by owner.
  placement.owner_offsets.assign(static_cast<size_t>(num_ranks) + 1, 0);
  for (const int32_t owner : placement.owner) {
    ++placement.owner_offsets[static_cast<size_t>(owner) + 1];
  }
  for (size_t rank = 0; rank < static_cast<size_t>(num_ranks); ++rank) {
    placement.owner_offsets[rank + 1] += placement.owner_offsets[rank];
  }
  std::vector<int64_t> next = placement.owner_offsets;
  placement.experts_by_owner.resize(placement.owner.size());
  for (size_t expert = 0; expert < placement.owner.size(); ++expert) {
    const int64_t place = next[static_cast<size_t>(placement.owner[expert])]++;
    placement.experts_by_owner[static_cast<size_t>(place)] = static_cast<int32_t>(expert);
  }
  return placement;
}

int gateway_is_destination(int /*source*/, int destination) {
  return destination;
}

Gateway gateway_per_node(const Topology& topology) {
  std::vector<std::vector<int>> nodes;
  std::vector<size_t> place(topology.node_of_rank.size());
  for (int node = 0; node < topology.num_nodes; ++node) {
    nodes.push_back(topology.ranks_of_node(node));
    for (size_t i = 0; i < nodes.back().size(); ++i) {
      place[static_cast<size_t>(nodes.back()[i])] = i;
    }
  }
  return [nodes = std::move(nodes), place = std::move(place), node_of = topology.node_of_rank](
             int source, int destination) {
    const std::vector<int>& node =
        nodes[static_cast<size_t>(node_of[static_cast<size_t>(destination)])];
    return node[place[static_cast<size_t>(source)] % node.size()];
  };
}

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
