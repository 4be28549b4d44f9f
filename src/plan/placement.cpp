#include "plan/placement.hpp"

#include <algorithm>

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

}  // namespace crossdock
