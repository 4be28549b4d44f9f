#pragma once

#include "cli/run/job.hpp"
#include "cli/run/rank.hpp"
#include "cli/run/values.hpp"
#include "crossdock/group.hpp"

namespace crossdock::cli {

/// Compares a sample with the fp64 reference, which computes it from `values`, not from the ranks'
/// tensors: routes, outputs and gradients of some tokens, and some rows of the weight gradients of
/// one expert per rank. Collective; the result is identical on every rank.
RunCheck check_run(Group& group, const RunJob& job, const RunValues& values,
                   const RunTensors& tensors, const RunOutcome& outcome);

}  // namespace crossdock::cli
