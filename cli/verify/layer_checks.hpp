#pragma once

#include <string>
#include <vector>

#include "crossdock/testing/conformance.hpp"

namespace crossdock::cli {

/// Checks of a whole MoeLayer against the fp64 reference, forward and backward:
/// "layer/skewed/bf16/clamped_swiglu", ... `device`: "cpu", or "cuda", where rank r uses GPU r
/// modulo the number of GPUs.
std::vector<conformance::Check> list_layer_checks(const std::string& device);

}  // namespace crossdock::cli
