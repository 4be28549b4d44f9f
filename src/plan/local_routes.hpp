#pragma once

#include <cstdint>
#include <vector>

#include "crossdock/plan.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock {

/// One rank's routing, checked, in one form whatever it came as.
struct LocalRoutes {
  int64_t T = 0;
  std::vector<int32_t> expert_ids;  // [T, K] expert of a kept route, or -1
  std::vector<int64_t> counts;      // [E] kept routes
  std::vector<int64_t> dropped;     // [E] routes that capacity dropped
  Buffer weights;                   // [T, K]; 0 where there is no kept route
  DType weight_dtype = DType::kF32;
};

/// Checks a routing and takes it over. Throws Error(kInvalidArgument) for the first thing wrong,
/// which names token and slot where it is about one. Weights of masked tokens and of slots without
/// a route are not looked at. Does not drop anything. REQUIRES a checked configuration.
LocalRoutes read_routes(const Routing& routing, const DispatchConfig& config, BufferPool& pool);
LocalRoutes read_routes(const DenseRouting& routing, const DispatchConfig& config,
                        BufferPool& pool);

}  // namespace crossdock
