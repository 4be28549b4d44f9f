#pragma once

#include <string>

#include "crossdock/router.hpp"

// Check a router's configuration and arguments, identically for every device. All throw
// Error(kInvalidArgument).

namespace crossdock::router {

/// The settings as "key=value;key=value". Routers with equal texts compute the same.
std::string config_text(const RouterConfig& config);

void check_config(const RouterConfig& config);
void check_route_args(const RouterConfig& config, const RouteArgs& args);
/// Refuses the output of a router with a different configuration. `name` is for the message.
void check_origin(const char* name, const RouterConfig& config, const RouterOutput& output);
void check_backward_args(const RouterConfig& config, const RouterBackwardArgs& args);

}  // namespace crossdock::router
