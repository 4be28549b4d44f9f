#pragma once

#include "crossdock/extend/communicator.hpp"
#include "crossdock/planner.hpp"

namespace crossdock {

/// Throws Error(kInvalidArgument) that names the rule a mesh breaks.
void check_mesh(const JobDescription& job);

/// ep, or all ranks of a pipeline stage.
int64_t expert_group_size(const JobDescription& job);

/// The number of tokens per rank; if it differs, the largest.
int64_t tokens_of_rank(const JobDescription& job);

/// The nodes of the expert group that spans the most nodes (of several, the first). REQUIRES a
/// checked mesh.
Topology widest_expert_group(const JobDescription& job);

}  // namespace crossdock
