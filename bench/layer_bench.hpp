#pragma once

#include <string_view>
#include <vector>

#include "bench/measure.hpp"
#include "bench/scenario.hpp"

namespace crossdock::bench {

/// Measures forward and backward of one rank's MoeLayer with SwiGLU experts, and checks some tokens
/// of its output against the reference. Collective.
std::vector<StepResult> run_layer(const Scenario& scenario, Group& group, std::string_view strategy,
                                  const Repeats& repeats, bool check);

}  // namespace crossdock::bench
