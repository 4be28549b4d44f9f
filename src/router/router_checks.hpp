#pragma once

#include "crossdock/router.hpp"

// Checks of a router's configuration and of its callers' arguments, the same for every device. They
// throw Error(kInvalidArgument).

namespace crossdock::router {

void check_config(const RouterConfig& config);
void check_route_args(const RouterConfig& config, const RouteArgs& args);
void check_backward_args(const RouterConfig& config, const RouterBackwardArgs& args);

}  // namespace crossdock::router
