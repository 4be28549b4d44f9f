#pragma once

#include "crossdock/moe_layer.hpp"

namespace crossdock {

// The layer works on [T, D]. These functions view tokens [B, L, D] as [B * L, D], and masks, ids
// and positions [B, L] as [B * L]. Other shapes are left unchanged: the layer checks them, so a
// refusal is the same on every rank. Nothing here throws.

MoeForwardArgs flat(const MoeForwardArgs& args);
MoeBackwardArgs flat(const MoeBackwardArgs& args);
MoeBackwardDwArgs flat(const MoeBackwardDwArgs& args);

/// Views a result [T, D] in the shape of x.
TensorView shaped_like(const ConstTensorView& x, const TensorView& result);

}  // namespace crossdock
