#pragma once

#include <cstdint>

#include "crossdock/group.hpp"
#include "crossdock/tensor.hpp"

namespace crossdock::cli {

/// A hash of the bits of all ranks' rows [T, D], in the order of ranks. It does not depend on how
/// the rows are divided among ranks. Collective; identical on every rank.
uint64_t checksum(Group& group, ConstTensorView rows);

}  // namespace crossdock::cli
