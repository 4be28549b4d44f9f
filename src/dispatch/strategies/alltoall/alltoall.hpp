#pragma once

#include <memory>

#include "crossdock/extend/strategy.hpp"

namespace crossdock {

/// Pack by destination, all-to-all-v, regroup by expert; the same way back. At most K rows per
/// token travel in each direction; with partial_sums one per (token, rank) comes back.
std::unique_ptr<Strategy> make_alltoall();

}  // namespace crossdock
