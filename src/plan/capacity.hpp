#pragma once

#include <cstdint>

#include "crossdock/plan.hpp"
#include "plan/local_routes.hpp"

namespace crossdock {

/// C = ceil((T * K / E) * factor), in double. REQUIRES: config.capacity is set.
int64_t capacity_rows(const DispatchConfig& config, int64_t num_tokens);

/// Rows of each source in each segment with pad_to_capacity; 0 without it.
int64_t padded_rows_per_source(const DispatchConfig& config);

/// Drops the routes beyond the capacity, if one is configured: their slots become -1 with weight 0,
/// and `dropped` counts them. Throws Error(kInvalidArgument) if pad_to_capacity is set and there
/// are more than max_tokens tokens.
void drop_beyond_capacity(const DispatchConfig& config, LocalRoutes& routes);

}  // namespace crossdock
