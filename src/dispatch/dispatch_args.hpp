#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "crossdock/dispatcher.hpp"
#include "crossdock/extend/strategy.hpp"

namespace crossdock {

// Checks of a dispatch's arguments, for tensors on the host and on GPUs.

/// The arguments that must be identical on every rank, for Proposal::config.
std::string call_text(const DispatchArgs& args);

/// Throws Error(kInvalidArgument) if an output overlaps another tensor.
void check_outputs(const DispatchArgs& args);
void check_outputs(const GatherSumArgs& args);
void check_outputs(const CombineBackwardArgs& args);
void check_collected(const ConstTensorView& rows, const TensorView& routes);

/// Throws Error(kInvalidArgument) if scales do not match x, num_chunks is invalid or an output
/// overlaps another tensor. Returns the shape that scales must have; nothing if there are none.
std::optional<Shape> check_args(const DispatchArgs& args, int64_t T, int64_t D);

}  // namespace crossdock
