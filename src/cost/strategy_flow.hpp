#pragma once

#include <cstdint>

#include "cost/route_sums.hpp"
#include "crossdock/extend/communicator.hpp"

namespace crossdock {

/// The strategies, as their costs tell them apart.
enum class StrategyKind : uint8_t { kAllgather, kAlltoall, kDirect, kHierarchical };

/// Whether ranks of a node store into and load from each other's memory.
constexpr bool reaches_peers(StrategyKind kind) {
  return kind == StrategyKind::kDirect || kind == StrategyKind::kHierarchical;
}

/// Gradients take the way of a dispatch, in the dtype of the results.
enum class Movement : uint8_t { kDispatch, kGradients, kCombine, kPartialSums };

/// The rows that a strategy moves between ranks. Inside a node these are rows stored into or loaded
/// from a peer's memory where reaches_peers.
LinkFlow flow_of(StrategyKind kind, Movement movement, const RouteSums& sums,
                 const Topology& topology);

}  // namespace crossdock
