#pragma once

#include "cli/run/job.hpp"
#include "cli/run/rank.hpp"
#include "cli/run/values.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cli {

/// Compares a sample with the fp64 reference, which gets its numbers from `values` and not from the
/// ranks: routes, outputs and gradients of some tokens, and some rows of weight gradients of one
/// expert of each rank. Collective; the same on all ranks.
RunCheck check_run(Group& group, const RunJob& job, const RunValues& values,
                   const RunTensors& tensors, const RunOutcome& outcome);

}  // namespace crossdock::cli
