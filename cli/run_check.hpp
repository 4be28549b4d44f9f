#pragma once

#include "crossdock/group.hpp"
#include "run_job.hpp"
#include "run_rank.hpp"
#include "run_values.hpp"

namespace crossdock::cli {

/// Compares a sample with the fp64 reference, which gets its numbers from `values` and not from the
/// ranks: routes, outputs and gradients of some tokens, and some rows of weight gradients of one
/// expert of each rank. Collective; the same on all ranks.
RunCheck check_run(Group& group, const RunJob& job, const RunValues& values,
                   const RunTensors& tensors, const RunOutcome& outcome);

}  // namespace crossdock::cli
