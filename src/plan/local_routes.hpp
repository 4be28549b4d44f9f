#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// One rank's routing, checked, in the same form for both kinds of input.
struct LocalRoutes {
  int64_t T = 0;
  int64_t K = 0;                    // slots per token
  std::vector<int32_t> expert_ids;  // [T, K] expert of a kept route, or -1
  std::vector<int64_t> counts;      // [E] kept routes
  std::vector<int64_t> dropped;     // [E] routes dropped by capacity
  Buffer weights;                   // [T, K]; 0 for routes that are not kept
  DType weight_dtype = DType::kF32;
};

/// Checks a routing and copies it. Throws Error(kInvalidArgument) at the first mistake, with its
/// token and slot. Weights of masked tokens and of slots without a route are ignored. Drops
/// nothing. REQUIRES: a valid configuration.
LocalRoutes read_routes(const Routing& routing, const DispatchConfig& config, BufferPool& pool);
/// K is the number of slots that this rank's map needs.
LocalRoutes read_routes(const DenseRouting& routing, const DispatchConfig& config,
                        BufferPool& pool);

/// Adds unused slots, for the K that all ranks have agreed on. REQUIRES: K >= routes.K.
void widen_slots(int64_t K, LocalRoutes& routes, BufferPool& pool);

}  // namespace crossdock
