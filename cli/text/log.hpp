#pragma once

#include "crossdock/group.hpp"

namespace crossdock::cli {

/// Options of a group whose long waits, and choices if CROSSDOCK_LOG is "info" or "debug", are
/// printed on standard error. Throws Error(kInvalidArgument) for other values.
GroupOptions printing_options(GroupOptions options = {});

}  // namespace crossdock::cli
