#pragma once

namespace crossdock::detail {

/// Cores that this process may use, at least 1.
int num_cores();

}  // namespace crossdock::detail
