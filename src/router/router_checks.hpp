#pragma once

#include "crossdock/router.hpp"

// Check a router's configuration and arguments, identically for every device. All throw
// Error(kInvalidArgument).

namespace crossdock::router {

void check_config(const RouterConfig& config);
void check_route_args(const RouterConfig& config, const RouteArgs& args);
void check_backward_args(const RouterConfig& config, const RouterBackwardArgs& args);

}  // namespace crossdock::router
