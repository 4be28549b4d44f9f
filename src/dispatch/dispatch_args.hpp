#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "crossdock/dispatcher.hpp"
#include "crossdock/extend/strategy.hpp"

namespace crossdock {

// What a dispatch asks of its arguments wherever the tensors are.

/// What must be identical on every rank, for Proposal::config.
std::string call_text(const DispatchArgs& args);

/// Throws Error(kInvalidArgument) where an output overlaps another tensor.
void check_outputs(const DispatchArgs& args);
void check_outputs(const GatherSumArgs& args);

/// Throws Error(kInvalidArgument) where scales do not go with x, num_chunks is not a number of
/// chunks or an output overlaps another tensor. Returns the shape that scales must have; nothing if
/// there are none.
std::optional<Shape> check_args(const DispatchArgs& args, int64_t T, int64_t D);

}  // namespace crossdock
