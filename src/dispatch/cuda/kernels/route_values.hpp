#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "comm/cuda/peer_signals.cuh"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// One fp32 number per route <-> one per row.
struct RouteValuesArgs {
  const RouteTarget* targets;  // [T, K]
  int64_t num_routes;          // T * K
  float* routes;               // [T, K]
  float* rows[kMaxPeers];      // [R] of every rank
  PeerSignals signals;
};

void load_route_values();  // before the first launch

/// rows[target of (t, k)] = routes[t, k]. Collective, as launch_put.
void launch_scatter_routes(const RouteValuesArgs& args, cudaStream_t stream);

/// routes[t, k] = rows[target of (t, k)], 0 without one or if a rank has not arrived. Collective,
/// as launch_pull_sum.
void launch_gather_routes(const RouteValuesArgs& args, cudaStream_t stream);

}  // namespace crossdock::cuda
