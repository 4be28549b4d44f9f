#pragma once

#include "crossdock/moe_layer.hpp"
#include "layer/layer_parts.hpp"

namespace crossdock {

// Check the arguments of a layer's calls: shapes, dtypes, that saved values come from this layer,
// and that no output overlaps an input or another output. All throw Error(kInvalidArgument).

void check_args(const LayerParts& parts, const MoeForwardArgs& args);
void check_args(const LayerParts& parts, const MoeBackwardArgs& args);
void check_args(const LayerParts& parts, const MoeBackwardDwArgs& args);

/// Check only the outputs of a call on replicated tokens: they are for all tokens, not a slice.
void check_outputs(const LayerParts& parts, const MoeForwardArgs& args);
void check_outputs(const LayerParts& parts, const MoeBackwardArgs& args);

}  // namespace crossdock
