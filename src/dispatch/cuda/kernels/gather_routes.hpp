#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "comm/cuda/peer_pointers.hpp"
#include "comm/cuda/peer_signals.cuh"
#include "plan/cuda/device_plan.hpp"

namespace crossdock::cuda {

/// From one fp32 number per row to one per route.
struct GatherRoutesArgs {
  const RouteTarget* targets;      // [T, K]
  int64_t num_routes;              // T * K
  PeerPointers<const float> rows;  // [R] of every rank
  float* routes;                   // [T, K]
  PeerSignals signals;
};

/// routes[t, k] = rows[target of (t, k)], or 0 if there is no target or a rank has not arrived.
/// Collective, like launch_gather_sum.
void load_gather_routes();  // before the first launch
void launch_gather_routes(const GatherRoutesArgs& args, cudaStream_t stream);

}  // namespace crossdock::cuda
