#pragma once

#include <cstdint>

#include "dispatch/cuda/cuda_rank.hpp"
#include "dispatch/cuda/exchange_plan.hpp"

namespace crossdock::cuda {

/// What `direct` and `hierarchical` need of a plan between nodes: one copy of a token travels to
/// each of its gateways, which store it into the final rows on their node; rows of other nodes come
/// home one by one. Sizes are on the host, index arrays on the device.
struct RelayPlan {
  RowTraffic copies;    // tokens to gateways
  RowTraffic far_home;  // rows to sources on other nodes

  Buffer memory;                         // of the arrays
  const int64_t* copy_tokens = nullptr;  // [copies sent] t
  // The `rank` of these targets is a slot of the channel.
  const RouteTarget* near_targets = nullptr;  // [T, K] on this node
  const RouteTarget* copy_targets = nullptr;  // [copies received, K]
  const int64_t* far_rows = nullptr;          // [rows sent home] row here
  const RouteTarget* sum_targets = nullptr;   // [T, K]; slot behind the last: came home
};

/// `plan` was made on the host by one of the two strategies. Collective; waits for the device.
RelayPlan make_relay_plan(CudaRank& rank, const Plan& plan);

}  // namespace crossdock::cuda
