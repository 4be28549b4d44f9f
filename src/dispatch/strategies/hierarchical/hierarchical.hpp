#pragma once

#include <memory>

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// As direct, but between nodes a token crosses once per destination node and is forwarded inside
/// it; with partial sums one row per node comes back.
std::unique_ptr<Strategy> make_hierarchical();

}  // namespace crossdock
