#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/plan.hpp"

namespace crossdock {

/// Which rank owns which expert.
struct Placement {
  std::vector<int32_t> owner;             // [E] expert -> rank
  std::vector<int32_t> experts_by_owner;  // [E] experts by (owner, expert)
  std::vector<int64_t> owner_offsets;     // [P + 1] into experts_by_owner
};

/// The configured placement, or the default one. REQUIRES: a valid configuration.
Placement make_placement(const DispatchConfig& config, int num_ranks);

}  // namespace crossdock
