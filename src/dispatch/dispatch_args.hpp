#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "crossdock/dispatcher.hpp"

namespace crossdock {

// What a dispatch asks of its arguments wherever the tensors are.

/// What all ranks must have alike, for Proposal::config.
std::string call_text(const DispatchArgs& args);

/// Throws Error(kInvalidArgument) where scales do not go with x, or num_chunks is not a number of
/// chunks. Returns the shape that scales must have; nothing if there are none.
std::optional<Shape> check_args(const DispatchArgs& args, int64_t T, int64_t D);

}  // namespace crossdock
