#pragma once

#include "crossdock/moe_layer.hpp"
#include "layer/layer_parts.hpp"

namespace crossdock {

// The arguments of a layer's calls: shapes, dtypes, values saved by this layer, and no output that
// overlaps an input or another output. Each throws Error(kInvalidArgument).

void check_args(const LayerParts& parts, const MoeForwardArgs& args);
void check_args(const LayerParts& parts, const MoeBackwardArgs& args);
void check_args(const LayerParts& parts, const MoeBackwardDwArgs& args);

/// The outputs alone, for all tokens of a call of which a rank computes a slice.
void check_outputs(const LayerParts& parts, const MoeForwardArgs& args);
void check_outputs(const LayerParts& parts, const MoeBackwardArgs& args);

}  // namespace crossdock
