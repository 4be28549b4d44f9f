#pragma once

#include <cstdint>

#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cli {

/// A hash of the bits of all ranks' rows [T, D], one after the other in the order of ranks: the
/// same for any number of ranks that hold the same rows in the same order. Collective; the same on
/// all ranks.
uint64_t checksum(Group& group, ConstTensorView rows);

}  // namespace crossdock::cli
