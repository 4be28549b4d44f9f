#pragma once

#include <string>

#include "crossdock/group.hpp"
#include "crossdock/moe_layer.hpp"

namespace crossdock {

/// The configuration with the fields that repeat filled in. Throws where a field is given twice and
/// differently.
MoeLayerConfig fill_in(MoeLayerConfig config, const Group& group);

/// What all ranks must have alike, for Proposal::config. The dispatcher has a text of its own.
std::string config_text(const MoeLayerConfig& config);

}  // namespace crossdock
