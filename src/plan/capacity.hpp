#pragma once

#include <cstdint>

#include "crossdock/plan.hpp"
#include "plan/local_routes.hpp"

namespace crossdock {

/// C = ceil((T * K / E) * factor) in double. REQUIRES config.capacity.
int64_t capacity_rows(const DispatchConfig& config, int64_t num_tokens);

/// Rows that each source has in each segment under pad_to_capacity; 0 otherwise.
int64_t padded_rows_per_source(const DispatchConfig& config);

/// Drops the routes beyond the capacity, if one is configured: their slots become -1 with weight 0,
/// and they are counted in `dropped`. Throws Error(kInvalidArgument) if there are more tokens than
/// max_tokens with pad_to_capacity.
void drop_beyond_capacity(const DispatchConfig& config, LocalRoutes& routes);

}  // namespace crossdock
