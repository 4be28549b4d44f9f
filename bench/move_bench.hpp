#pragma once

#include <string_view>
#include <vector>

#include "bench/measure.hpp"
#include "bench/workload.hpp"

namespace crossdock::bench {

/// Measures and checks one rank's part of a scenario of kind kMove. Collective.
std::vector<StepResult> run_move(const Workload& workload, Group& group, std::string_view strategy,
                                 const Repeats& repeats, bool check);

}  // namespace crossdock::bench
