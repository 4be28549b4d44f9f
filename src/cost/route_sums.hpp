#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "crossdock/extend/communicator.hpp"
#include "crossdock/extend/strategy_model.hpp"

namespace crossdock {

/// The sums for this many tokens on every rank, each with this spread.
RouteSums expected_sums(const TokenSpread& spread, const Topology& topology, int64_t tokens);

/// [P] Number of ranks on other nodes that reach this rank's node through it, with one gateway per
/// node (gateway_per_node in gateway.hpp).
std::vector<double> sources_of_gateways(const Topology& topology);

/// One rank's routes: [T, K] experts, -1 for none.
struct CountedRoutes {
  std::span<const int32_t> expert_ids;
  int64_t top_k = 0;
};

/// Counts the given routes of every rank.
RouteSums counted_sums(std::span<const CountedRoutes> ranks, std::span<const int32_t> owner,
                       const Topology& topology);

}  // namespace crossdock
