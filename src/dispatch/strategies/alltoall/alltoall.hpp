#pragma once

#include <memory>

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Packs by destination, exchanges by all-to-all-v, regroups by expert; returns in reverse. At most
/// K rows per token in each direction; with partial_sums one per (token, rank) returns.
std::unique_ptr<Strategy> make_alltoall();

}  // namespace crossdock
