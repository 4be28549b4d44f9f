#pragma once

#include <string>

#include "crossdock/group.hpp"
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

// The layer works on [T, D]. These functions view tokens [B, L, D] as [B * L, D], and masks, ids
// and positions [B, L] as [B * L]. Other shapes are left unchanged: the layer checks them, so a
// refusal is the same on every rank. Nothing here throws.

MoeForwardArgs flat(const MoeForwardArgs& args);
MoeBackwardArgs flat(const MoeBackwardArgs& args);
MoeBackwardDwArgs flat(const MoeBackwardDwArgs& args);

/// Views a result [T, D] in the shape of x.
TensorView shaped_like(const ConstTensorView& x, const TensorView& result);

/// The configuration with all repeated fields filled in. Throws Error(kInvalidArgument) if a
/// repeated field has two different values or a size is out of range.
MoeLayerConfig fill_in(MoeLayerConfig config, const Group& group);

/// The settings that must be identical on every rank, for Proposal::config. The dispatcher's
/// settings are in its own text.
std::string config_text(const MoeLayerConfig& config);

}  // namespace crossdock
