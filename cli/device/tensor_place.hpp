#pragma once

#include <string>

#include "crossdock/testing/tensor_place.hpp"

namespace crossdock::cli {

/// Places on a device, "cpu" or "cuda" (see make_rank_device).
conformance::MakePlace tensor_places(const std::string& device);

}  // namespace crossdock::cli
