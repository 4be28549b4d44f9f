#pragma once

#include <utility>
#include <vector>

#include "crossdock/tensor.hpp"
#include "plan/local_routes.hpp"

namespace crossdock {

/// The routes of a rank from its ids [T, K], with capacity applied; weights default to 1.
inline LocalRoutes read_kept_routes(const DispatchConfig& config, const std::vector<int32_t>& ids,
                                    std::vector<float> weights = {}) {
  BufferPool pool;
  const int64_t T = static_cast<int64_t>(ids.size()) / config.top_k;
  if (weights.empty()) weights.assign(ids.size(), 1.0F);
  LocalRoutes routes = read_routes(Routing{.expert_ids = {ids.data(), {T, config.top_k}},
                                           .weights = {weights.data(), {T, config.top_k}},
                                           .mask = {}},
                                   config, pool);
  drop_beyond_capacity(config, routes);
  return routes;
}

}  // namespace crossdock
