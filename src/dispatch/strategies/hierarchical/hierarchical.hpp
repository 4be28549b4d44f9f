#pragma once

#include <memory>

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Like direct, but between nodes a token is sent once per destination node and forwarded within
/// it; with partial sums one row per node returns.
std::unique_ptr<Strategy> make_hierarchical();

}  // namespace crossdock
