#pragma once

#include <vector>

#include "bench/measure.hpp"
#include "bench/result.hpp"
#include "crossdock/group.hpp"

namespace crossdock::bench {

/// Measures Group::agree with an empty body, many calls in a row. Collective.
std::vector<StepResult> run_agree(Group& group, const Repeats& repeats);

}  // namespace crossdock::bench
