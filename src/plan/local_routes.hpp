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

/// C = ceil((T * K / E) * factor), in double. REQUIRES: config.capacity is set.
int64_t capacity_rows(const DispatchConfig& config, int64_t num_tokens);

/// Rows of each source in each segment with pad_to_capacity; 0 without it.
int64_t padded_rows_per_source(const DispatchConfig& config);

/// Drops the routes beyond the capacity, if one is configured: their slots become -1 with weight 0,
/// and `dropped` counts them. Throws Error(kInvalidArgument) if pad_to_capacity is set and there
/// are more than max_tokens tokens.
void drop_beyond_capacity(const DispatchConfig& config, LocalRoutes& routes);

}  // namespace crossdock
