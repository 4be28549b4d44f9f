#pragma once

#include <string>

#include "crossdock/group.hpp"
#include "crossdock/moe_layer.hpp"

namespace crossdock {

/// The configuration with all repeated fields filled in. Throws Error(kInvalidArgument) if a
/// repeated field has two different values or a size is out of range.
MoeLayerConfig fill_in(MoeLayerConfig config, const Group& group);

/// The settings that must be identical on every rank, for Proposal::config. The dispatcher's
/// settings are in its own text.
std::string config_text(const MoeLayerConfig& config);

}  // namespace crossdock
