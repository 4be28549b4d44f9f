#pragma once

#include <functional>
#include <string>

#include "crossdock/testing/layer_worlds.hpp"

namespace crossdock::cli {

/// Makes the place of a rank's tensors on a device, "cpu" or "cuda" (see make_rank_device).
std::function<conformance::LayerPlace(Group&)> layer_places(const std::string& device);

}  // namespace crossdock::cli
